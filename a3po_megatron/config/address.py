"""Hosts and ports as they stand in a URL."""

import re
from urllib.parse import urlsplit


def url_of(host: str, port: int) -> str:
    """Return `http://HOST:PORT`; an IPv6 address in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_url(text: str) -> bool:
    """Whether `text` is a URL that can be asked: http or https, a host, and a port that there can be if one is named."""
    try:
        parts = urlsplit(text)
        port = parts.port  # ValueError where it is no number, or above 65535
    except ValueError:
        return False
    is_host = bool(parts.hostname) and not re.search(r"\][^:]", parts.netloc)  # urlsplit reads [::1]x as [::1]
    return parts.scheme in ("http", "https") and is_host and port != 0 and not re.search(r"\s", text)
