"""Reads one file over http(s): bounded in size and time, and never from private addresses.

The address is looked up once, checked, and that very address is connected to, so that a name cannot point to one
place for the check and to another for the connection. Redirects go through the same check.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import quote, urljoin, urlsplit

from vismmoe.errors import ImageError

TIMEOUT_S = 20.0  # for the whole of one fetch, redirects included
MAX_REDIRECTS = 3
BLOCK_BYTES = 256 * 1024


def fetch(url: str, *, max_bytes: int, timeout_s: float = TIMEOUT_S, allow_private: bool = False) -> bytes:
    """Return the body of `url`. Raises ImageError with a sentence on any failure."""
    deadline = time.monotonic() + timeout_s
    current = url
    for _ in range(MAX_REDIRECTS + 1):
        try:
            body, redirect = _get(current, deadline, max_bytes, allow_private)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, TimeoutError) or time.monotonic() >= deadline:
                raise ImageError(f"{url} did not answer within {timeout_s:g} s") from None
            raise ImageError(f"{current} cannot be read ({error})") from None
        if redirect is None:
            return body
        current = urljoin(current, redirect)
    raise ImageError(f"{url} redirects more than {MAX_REDIRECTS} times")


def _get(url: str, deadline: float, max_bytes: int, allow_private: bool) -> tuple[bytes, str | None]:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ImageError(f"{url} is no http(s) address")
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    address = _public_address(parts.hostname, port, allow_private)
    raw = socket.create_connection((address, port), timeout=_left(deadline))
    connection = http.client.HTTPConnection(parts.hostname, port)
    try:
        if secure:
            raw = ssl.create_default_context().wrap_socket(raw, server_hostname=parts.hostname)
        connection.sock = raw
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        target = quote(target, safe="/?%!$&'()*+,;=:@~")  # people's addresses hold blanks and letters beyond ASCII
        with _cut_at(deadline, raw):
            connection.request("GET", target, headers={"User-Agent": "vismmoe", "Accept": "image/*"})
            response = connection.getresponse()
        if response.status in (301, 302, 303, 307, 308):
            return b"", response.headers.get("Location") or ""
        if response.status != 200:
            raise ImageError(f"{url} answers with status {response.status} {response.reason}")
        return _body(response, raw, url, deadline, max_bytes), None
    finally:
        connection.close()
        raw.close()


@contextmanager
def _cut_at(deadline: float, raw: socket.socket) -> Iterator[None]:
    """Ends the connection at the deadline: a server may drip its headers, each within the time of one read."""
    timer = threading.Timer(_left(deadline), _shut, [raw])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _shut(raw: socket.socket) -> None:
    with suppress(OSError):  # closed meanwhile
        raw.shutdown(socket.SHUT_RDWR)


def _body(response: http.client.HTTPResponse, raw: socket.socket, url: str, deadline: float, max_bytes: int) -> bytes:
    blocks: list[bytes] = []
    total = 0
    while True:
        raw.settimeout(_left(deadline))  # a server that drips is cut off by the deadline, not by each read
        block = response.read1(BLOCK_BYTES)
        if not block:
            return b"".join(blocks)
        blocks.append(block)
        total += len(block)
        if total > max_bytes:
            raise ImageError(f"{url} is larger than the {max_bytes} bytes that are read of one image")


def _public_address(host: str, port: int, allow_private: bool) -> str:
    found = {str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    for address in sorted(found):
        if not allow_private and not _is_public(address):
            raise ImageError(f"{host} is the private or local address {address}, which is not read from")
    return sorted(found)[0]


def _is_public(address: str) -> bool:
    ip = ipaddress.ip_address(address.split("%")[0])
    judged = _within(ip) or [ip]
    local = getattr(ip, "is_site_local", False)  # fec0::/10, which Python counts as global
    return not local and all(each.is_global and not (each.is_multicast or each.is_reserved) for each in judged)


def _within(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """IPv4 addresses that gateways may turn an IPv6 address into: mapped, 6to4, Teredo, NAT64, compatible."""
    if isinstance(ip, ipaddress.IPv4Address):
        return []
    found = [each for each in (ip.ipv4_mapped, ip.sixtofour, *(ip.teredo or ())) if each is not None]
    if any(ip in ipaddress.ip_network(network) for network in ("64:ff9b::/96", "::/96")):
        found.append(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF))
    return [*found]


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
