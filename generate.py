"""python generate.py CONFIG.yml prompt="..." key=value ...: see src/maxdiff/generate.py."""

import sys

from maxdiff.generate import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
