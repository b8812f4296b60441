"""What counts as a URL is what an HTTP client can ask."""

import httpx
import pytest

from a3po_megatron.config.address import is_url, url_of


@pytest.mark.parametrize(
    "url",
    [
        url_of("127.0.0.1", 80),
        url_of("::1", 65535),
        "https://judge.example/v1?a=b",
        "http://u:p@node_1:8000/x",
        "HTTP://a",
    ],
)
def test_a_url_is_one_for_httpx_too(url: str) -> None:
    assert is_url(url)
    assert httpx.URL(url).host


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a:80",
        "ftp://a",
        "http://",
        "http://:80",
        "http://a:b",
        "http://a:0",
        "http://a:65536",
        "http://[::1]x:80",
        "http://a\n",
        " http://a",
        "http://a b:80/",
        "http://[::1",
    ],
)
def test_what_cannot_be_asked_is_none(text: str) -> None:
    assert not is_url(text)
