"""Hosts and ports as they stand in a URL."""


def url_of(host: str, port: int) -> str:
    """Return `http://HOST:PORT`; an IPv6 address in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
