"""Tickets, addresses, identities: their forms, their secrets, and malformed ones that are refused."""

from __future__ import annotations

import datetime
import os
import socket
import stat
from pathlib import Path

import pytest
from tests.support.system import need_root

from unisono.bootstrap.address import Address, bindable, resolve, source_toward
from unisono.bootstrap.identity import Authority, Name, WorkerKey, verified_name
from unisono.bootstrap.limits import printable
from unisono.bootstrap.ticket import Ticket, TicketSource, new_token
from unisono.errors import ProtocolError, RendezvousError, UsageError

NOW = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)
HOUR = datetime.timedelta(hours=1)
DAY = datetime.timedelta(days=1)


# -- addresses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("node7", "node7", 0),
        ("node7:4711", "node7", 4711),
        ("10.0.0.1:1", "10.0.0.1", 1),
        ("::1", "::1", 0),
        ("[::1]", "::1", 0),
        ("[fe80::1%eth0]:65535", "fe80::1%eth0", 65535),
    ],
)
def test_an_address_is_read_as_users_write_it(text: str, host: str, port: int) -> None:
    address = Address.parse(text)
    assert address == Address(host, port)
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    "text", ["", ":1", "[::1", "[::1]x", "a b", "a/b", "h:65536", "h:-1", "h:x", "h\n:1", "h:²"]
)
def test_a_malformed_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="allowed"):
        Address.parse(text)


def test_loopback_and_wildcards_are_known_in_both_families() -> None:
    assert all(Address(host).is_loopback for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"))
    assert not any(
        Address(host).is_loopback for host in ("10.0.0.1", "0.0.0.0", "::", "2001:db8::1", "node7")
    )
    assert Address("0.0.0.0").is_wildcard
    assert Address("::").is_wildcard


def test_an_interface_stands_for_its_address() -> None:
    assert bindable("lo") == Address("127.0.0.1")
    assert bindable("lo:4711") == Address("127.0.0.1", 4711)
    assert bindable("::1") == Address("::1")


def test_an_address_of_another_host_cannot_be_bound() -> None:
    with pytest.raises(UsageError, match=r"203\.0\.113\.9.*not an address of this host; interfaces: .*lo"):
        bindable("203.0.113.9")


def test_the_way_to_loopback_starts_on_loopback() -> None:
    assert source_toward(Address("127.0.0.1", 9), 1) == "127.0.0.1"
    assert source_toward(Address("::1", 9), 1) == "::1"


def test_a_slow_name_server_costs_no_more_than_the_time_given(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    answer = threading.Event()

    def slow(*_: object, **__: object) -> list[object]:
        answer.wait(30)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    try:
        with pytest.raises(TimeoutError, match=r"'node7' was not resolved in 0\.05 s"):
            resolve(Address("node7", 1), 0.05)
    finally:
        answer.set()


# -- tickets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fingerprint", [b"", bytes(range(32))])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_ticket_survives_its_text_form(host: str, fingerprint: bytes) -> None:
    ticket = Ticket.create(Address(host, 4711), fingerprint)
    assert Ticket.parse(ticket.text() + "\n") == ticket


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda text: "", "it is empty"),
        (lambda text: "x" + text, "does not begin with unisono1://"),
        (lambda text: text[:-1], "token is not 64 hexadecimal digits"),
        (lambda text: text + "/", "4 parts instead of 3"),
        (lambda text: text.replace("plain", "plane"), "fingerprint is not"),
        (lambda text: text.replace(":4711", ""), "has no port"),
        (lambda text: text + "0" * 2000, "longer than"),
    ],
)
def test_a_malformed_ticket_says_why_and_shows_nothing(change, complaint: str) -> None:  # type: ignore[no-untyped-def]
    ticket = Ticket.create(Address("127.0.0.1", 4711))
    with pytest.raises(UsageError, match=complaint) as caught:
        Ticket.parse(change(ticket.text()))
    assert ticket.token.hex()[:16] not in str(caught.value)


def test_a_plain_ticket_never_leaves_the_host_unasked() -> None:
    text = Ticket.create(Address("10.0.0.1", 4711)).text()
    with pytest.raises(UsageError, match="without a certificate"):
        Ticket.parse(text)
    assert Ticket.parse(text, insecure=True).address.host == "10.0.0.1"


def test_tokens_are_unique_and_look_random() -> None:
    tokens = [new_token() for _ in range(1000)]
    assert len(set(tokens)) == 1000
    assert {len(token) for token in tokens} == {32}
    ones = sum(int.from_bytes(token).bit_count() for token in tokens)
    assert abs(ones - 128_000) < 6 * 253  # six standard deviations of 256,000 fair coins
    # No bit is constant, unlike the head of an encoded key.
    together = [sum(token[i] for token in tokens) / 1000 for i in range(32)]
    assert all(abs(mean - 127.5) < 6 * 73.9 / 1000**0.5 for mean in together)


def test_no_secret_shows_in_a_repr() -> None:
    ticket = Ticket.create(Address("127.0.0.1", 4711))
    source = TicketSource(ticket.text())
    for shown in (repr(ticket), str(ticket), f"{ticket}", repr(source), repr([ticket]), repr({"t": source})):
        assert ticket.token.hex() not in shown
        assert repr(ticket.token)[2:-1] not in shown


def test_a_ticket_file_is_private_and_goes_away(tmp_path: Path) -> None:
    source = TicketSource(str(tmp_path / "job.ticket"))
    ticket = Ticket.create(Address("127.0.0.1", 4711))
    with pytest.raises(FileNotFoundError):
        source.read()
    remove = source.write(ticket)
    assert stat.S_IMODE((tmp_path / "job.ticket").stat().st_mode) == 0o600
    assert source.read() == ticket
    remove()
    assert list(tmp_path.iterdir()) == []


def test_removing_an_old_ticket_spares_a_new_one(tmp_path: Path) -> None:
    source = TicketSource(str(tmp_path / "job.ticket"))
    remove_old = source.write(Ticket.create(Address("127.0.0.1", 1)))
    newer = Ticket.create(Address("127.0.0.1", 2))
    source.write(newer)
    remove_old()
    assert source.read() == newer


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_ticket_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "job.ticket"
    TicketSource(str(path)).write(Ticket.create(Address("127.0.0.1", 4711)))
    path.chmod(mode)
    with pytest.raises(RendezvousError, match=f"other users: mode {mode:04o}.*Next: chmod"):
        TicketSource(str(path)).read()


def test_a_folder_for_tickets_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    source = TicketSource.keyed(str(tmp_path), "job 1")
    assert source.path is not None
    source.write(Ticket.create(Address("127.0.0.1", 4711)))
    assert stat.S_IMODE(source.path.parent.stat().st_mode) == 0o700
    source.path.parent.chmod(0o755)
    with pytest.raises(RendezvousError, match="other users"):
        source.read()


def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    need_root("give files away")
    source = TicketSource.keyed(str(tmp_path), "job 1")
    assert source.path is not None
    source.path.parent.mkdir(mode=0o700)
    os.chown(source.path.parent, 12345, 12345)
    with pytest.raises(RendezvousError, match="belongs to user 12345"):
        source.write(Ticket.create(Address("127.0.0.1", 4711)))


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    source = TicketSource.keyed(str(tmp_path), "job 1")
    assert source.path is not None
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    source.path.parent.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RendezvousError, match="is not a folder"):
        source.read()


# -- identities --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority("ab" * 16, NOW)


def test_a_certificate_names_job_rank_and_incarnation(authority: Authority) -> None:
    key = WorkerKey()
    pem = authority.certify(key.request(), 3, 1, NOW)
    assert verified_name(pem, authority.certificate_pem, NOW) == Name("ab" * 16, 3, 1)
    identity = key.identity(pem, authority.certificate_pem, NOW)
    assert identity.name.uri == f"unisono://{'ab' * 16}/3/1"
    assert b"PRIVATE KEY" in identity.key_pem
    assert "PRIVATE" not in repr(identity)
    assert "BEGIN" not in repr(identity)


def test_a_certificate_for_another_key_is_refused(authority: Authority) -> None:
    pem = authority.certify(WorkerKey().request(), 3, 0, NOW)
    with pytest.raises(ProtocolError, match="another key"):
        WorkerKey().identity(pem, authority.certificate_pem, NOW)


def test_a_certificate_of_another_authority_is_refused(authority: Authority) -> None:
    pem = Authority("ab" * 16, NOW).certify(WorkerKey().request(), 3, 0, NOW)
    with pytest.raises(ProtocolError, match="not from this job's seed"):
        verified_name(pem, authority.certificate_pem, NOW)


@pytest.mark.parametrize(
    ("when", "is_valid"),
    [(-3 * HOUR, True), (-DAY, False), (0 * HOUR, True), (89 * DAY, True), (91 * DAY, False)],
)
def test_clocks_may_differ_but_certificates_expire(
    authority: Authority, when: datetime.timedelta, is_valid: bool
) -> None:
    pem = authority.certify(WorkerKey().request(), 0, 0, NOW)
    if is_valid:
        assert verified_name(pem, authority.certificate_pem, NOW + when).rank == 0
    else:
        with pytest.raises(ProtocolError, match="not valid now"):
            verified_name(pem, authority.certificate_pem, NOW + when)


def test_the_authority_is_no_rank_and_a_rank_is_no_authority(authority: Authority) -> None:
    with pytest.raises(ProtocolError):
        verified_name(authority.certificate_pem, authority.certificate_pem, NOW)
    leaf = authority.certify(WorkerKey().request(), 0, 0, NOW)
    with pytest.raises(ProtocolError):
        verified_name(authority.certify(WorkerKey().request(), 1, 0, NOW), leaf, NOW)


def test_a_broken_request_is_refused_whatever_is_broken(authority: Authority) -> None:
    good = WorkerKey().request()
    for i in range(0, len(good), 3):
        broken = good[:i] + bytes([good[i] ^ 0x55]) + good[i + 1 :]
        with pytest.raises(ProtocolError):
            authority.certify(broken, 0, 0, NOW)
    for garbage in (b"", b"\x30", b"\x30\x84\xff\xff\xff\xff", bytes(100)):
        with pytest.raises(ProtocolError):
            authority.certify(garbage, 0, 0, NOW)


# -- text from elsewhere -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "evil", ["a\nb", "\x1b[31mred", "a\u202eb", "a\x00", "a\u2028b", "\ud800", "x" * 10**6]
)
def test_a_strangers_text_is_one_short_line(evil: str) -> None:
    shown = printable(evil)
    assert shown.isprintable()
    assert len(shown) <= 256
