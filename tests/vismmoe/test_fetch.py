"""Fetching is bounded in size and time and never leaves the public internet. A server on this machine stands in."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from vismmoe.errors import ImageError
from vismmoe.fetch import _is_public, fetch

BODY = bytes(range(256)) * 40


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/loop":
            self._head(302, Location="/loop")
        elif self.path == "/moved":
            self._head(301, Location="/body?x=1")
        elif self.path == "/away":
            self._head(302, Location="http://10.0.0.1/secret")
        elif self.path == "/gone":
            self._head(404)
        elif self.path == "/drip":
            self._head(200)
            while True:
                self.wfile.write(b"x")
                time.sleep(0.1)
        elif self.path == "/drip-head":
            self.wfile.write(b"HTTP/1.0 200 OK\r\nX: ")
            while True:
                self.wfile.write(b"y")
                time.sleep(0.1)
        elif self.path == "/b%C3%A4r%20tig.png?q=%20" or self.path.startswith("/body"):
            self._head(200)
            self.wfile.write(BODY)

    def _head(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.handle_error = lambda *args: None  # type: ignore[method-assign]  # clients that hang up are the point
    httpd.daemon_threads = True
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    thread.join()
    httpd.server_close()


@pytest.mark.parametrize("path", ["/body", "/moved"])
def test_the_body_is_read_through_redirects(server: str, path: str) -> None:
    assert fetch(server + path, max_bytes=len(BODY), allow_private=True) == BODY


@pytest.mark.parametrize("path", ["/bär tig.png?q= ", "/b%C3%A4r%20tig.png?q=%20"])
def test_blanks_and_letters_of_any_language_may_stand_in_an_address(server: str, path: str) -> None:
    assert fetch(server + path, max_bytes=len(BODY), allow_private=True) == BODY


@pytest.mark.parametrize("address", ["8.8.8.8", "::ffff:8.8.8.8", "64:ff9b::808:808", "2001:4860:4860::8888"])
def test_public_addresses_are_known_in_every_spelling(address: str) -> None:
    assert _is_public(address)


def test_one_byte_too_many_is_refused(server: str) -> None:
    with pytest.raises(ImageError, match="larger than"):
        fetch(server + "/body", max_bytes=len(BODY) - 1, allow_private=True)


@pytest.mark.parametrize("path", ["/drip", "/drip-head"])
def test_a_server_that_drips_is_cut_off_by_the_clock(server: str, path: str) -> None:
    with pytest.raises(ImageError, match="within"):  # the server would go on for ever
        fetch(server + path, max_bytes=10**9, timeout_s=0.4, allow_private=True)


@pytest.mark.parametrize(("path", "told"), [("/loop", "redirects more"), ("/gone", "404")])
def test_what_gives_no_body_is_told(server: str, path: str, told: str) -> None:
    with pytest.raises(ImageError, match=told):
        fetch(server + path, max_bytes=1000, allow_private=True)


@pytest.mark.parametrize(
    "host",
    [
        *(
            "127.0.0.1",
            "localhost",
            "[::1]",
            "[::ffff:127.0.0.1]",
            "169.254.169.254",
            "10.1.2.3",
            "0.0.0.0",
            "2130706433",
        ),
        *("[64:ff9b::7f00:1]", "[2002:7f00:1::]", "[::7f00:1]", "[fec0::1]"),
    ],
)
def test_private_addresses_are_refused(host: str) -> None:
    with pytest.raises(ImageError, match="private or local"):
        fetch(f"http://{host}/a.png", max_bytes=1000)


def test_a_redirect_to_a_private_address_is_refused_too(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vismmoe.fetch._is_public", lambda address: address == "127.0.0.1")
    with pytest.raises(ImageError, match=r"10\.0\.0\.1"):
        fetch(server + "/away", max_bytes=1000)


@pytest.mark.parametrize("url", ["http://", "http:///a.png", "http://host:port/a.png", "https://127.0.0.1:99999/"])
def test_a_broken_address_is_told_in_a_sentence(url: str) -> None:
    with pytest.raises(ImageError):
        fetch(url, max_bytes=1000, allow_private=True)


def test_nobody_listening_is_told_in_a_sentence() -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))  # the port is taken, and nobody listens at it
        with pytest.raises(ImageError, match="cannot be read"):
            fetch(f"http://127.0.0.1:{mute.getsockname()[1]}/", max_bytes=1000, allow_private=True)
