"""How `binade serve` shares the app: which users have access, and which of them may change something. This module does
not import Streamlit."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from binade.app.frame.base_path import base_path_of
from binade.data.run.store import read_text
from binade.data.words.text import describe

LOOPBACK = "127.0.0.1"
USER = "binade_user"  # key in Streamlit's st.user: the user name in the proxy's header


class SharingError(ValueError):
    """The options of `binade serve` contradict each other."""

    exit_status = 2


@dataclass(frozen=True)
class Sharing:
    """hosts      Host headers that are answered, in lower case
    header     of the proxy at the address `proxy`, with the name of the user that it has authenticated; "": no proxy
    login      whether users sign in with Streamlit's OpenID Connect
    operators  the users who may change something; None: everybody
    base_path  of the app's address behind a proxy, such as /team/binade; "" for none
    """

    hosts: tuple[str, ...] = ()
    header: str = ""
    proxy: str = ""
    login: bool = False
    operators: frozenset[str] | None = None
    base_path: str = ""

    @property
    def has_users(self) -> bool:
        return self.login or bool(self.header)


current = Sharing()  # of this process: `binade serve` sets it before Streamlit starts


def address_of(text: str) -> IPv4Address | IPv6Address:
    """An IP address. An IPv4 address as shown by an IPv6 socket (::ffff:127.0.0.1) becomes the IPv4 address. Raises
    ValueError."""
    address = ip_address(text)
    return getattr(address, "ipv4_mapped", None) or address


def loopback(port: int) -> tuple[str, ...]:
    """The Host headers of this machine's own browsers."""
    return tuple(name if port == 80 else f"{name}:{port}" for name in (LOOPBACK, "localhost", "[::1]"))


def sharing_of(
    host: str,
    port: int,
    allow_host: tuple[str, ...] = (),
    header: str | None = None,
    proxy: str | None = None,
    login: bool = False,
    operators: str | None = None,
    base_path: str = "",
) -> Sharing:
    """The Sharing for the options of `binade serve`; None where an option is not given. Raises SharingError if they
    would admit unauthenticated users or contradict each other."""
    for option, text in (("--trust-proxy-header", header), ("--proxy", proxy), ("--operators", operators)):
        if text is not None and not text.strip():
            raise SharingError(f"{option} is empty: give it a value, or leave the option out")
    try:
        address = address_of(host)
    except ValueError:
        raise SharingError(f"--host {host}: expected an IP address, such as {LOOPBACK} or 0.0.0.0") from None
    if (header is None) != (proxy is None):
        raise SharingError(
            "--trust-proxy-header NAME and --proxy ADDRESS must be given together: only the header of that proxy is "
            "trusted"
        )
    if proxy is not None:
        try:
            proxy = str(address_of(proxy))
        except ValueError:
            raise SharingError(f"--proxy {proxy}: expected the IP address that the proxy connects from") from None
    if login and header:
        raise SharingError("--login and --trust-proxy-header: choose one, so that each user has one name")
    if not (address.is_loopback or login or header):
        raise SharingError(
            f"--host {host} would give access to everybody who can reach this machine. Serve on {LOOPBACK} and forward "
            f"the port: ssh -L {port}:{LOOPBACK}:{port} MACHINE. Or authenticate: --login or --trust-proxy-header "
            "(docs/serving.md)"
        )
    host_names = () if address.is_unspecified or address.is_loopback else (f"[{host}]" if ":" in host else host,)
    try:
        path = base_path_of(base_path)
    except ValueError:
        raise SharingError(
            f"--base-path {base_path}: expected a path of letters, digits and . _ ~ @ -, such as /team/binade"
        ) from None
    hosts = (*loopback(port), *(name if port == 80 else f"{name}:{port}" for name in host_names), *allow_host)
    names = None if operators is None else _names(operators)
    if names is not None and not (login or header):
        raise SharingError("--operators needs named users: give --login or --trust-proxy-header as well")
    return Sharing(tuple(name.lower() for name in hosts), header or "", proxy or "", login, names, path)


def _names(given: str) -> frozenset[str]:
    """Names from a file, one per line, or from a text separated by commas. A text with a comma is never a file."""
    path, lines = Path(given), given.split(",")
    if len(lines) == 1:
        try:
            if path.is_file():
                lines = [line.partition("#")[0] for line in read_text(path).splitlines()]
            elif "/" in given or path.suffix == ".txt":
                raise SharingError(f"--operators {given}: there is no such file")
        except OSError as error:
            raise SharingError(f"--operators: {describe(error)}") from None
        except UnicodeError:
            raise SharingError(f"--operators {given}: expected a text file in UTF-8") from None
    names = frozenset(line.strip() for line in lines if line.strip())
    if not names:
        raise SharingError(f"--operators {given}: the list is empty; use --read-only to deny changes to everyone")
    return names
