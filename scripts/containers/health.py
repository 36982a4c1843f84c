"""Whether the container's first inference server answers: the HEALTHCHECK of both images. The port may be given."""

from __future__ import annotations

import http.client
import sys

LIMIT_S = 4.0


def is_healthy(port: int) -> bool:
    """Without a proxy, which is not for this machine itself."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(not is_healthy(int(sys.argv[1]) if len(sys.argv) > 1 else 8100))
