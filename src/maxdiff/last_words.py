"""Says what a training process no longer can: run beside it by maxdiff.peers, of the standard library alone.

It reads lines: each says where the run is, and an empty one says goodbye. If the lines end without it, the process was
killed, or JAX aborted it; then it looks whether process 0, which JAX's coordination service is part of, still answers.
"""

import socket
import sys
import time


def answers(address: str) -> bool:
    """Whether anything listens at host:port."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=5):
            return True
    except OSError:
        return False


def main() -> None:
    """Read until the end."""
    place = b""
    for line in sys.stdin.buffer:
        if line == b"\n":
            return
        place = line.strip()
    time.sleep(1)  # what JAX writes comes first
    address = sys.argv[1]
    said = f"this process was killed, or aborted by JAX: {place.decode()}"
    if not answers(address):
        said = f"process 0, which JAX finds the others by, was lost: nothing answers at {address} any more\n{said}"
    print(said, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
