"""python train.py CONFIG.yml key=value ...: see src/maxdiff/train.py."""

import sys

from maxdiff.train import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
