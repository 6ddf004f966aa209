"""The seed with real sockets: correct ranks join, others are refused by name, secrets stay secret.

The numbers T1 to T16 are those of the threat model in SECURITY.md.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import re
import secrets
import socket
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.support.joining_ranks import (
    PATIENCE_S,
    VERSION,
    MakeSeed,
    a_request,
    authenticated,
    connected,
    first_reply,
    is_closed_by_seed,
    with_tls,
)

from unisono.bootstrap import protocol
from unisono.bootstrap.address import Address
from unisono.bootstrap.identity import Authority, verified_name
from unisono.bootstrap.join import join
from unisono.bootstrap.seed import Seed
from unisono.bootstrap.ticket import Ticket, TicketSource
from unisono.config import Config
from unisono.core.clock import RealRuntime
from unisono.errors import RendezvousError, UsageError

# -- correct ranks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_every_rank_gets_the_same_view(make_seed: MakeSeed, tls: bool, host: str) -> None:
    seed, ranks = make_seed(5, address=Address(host), tls=tls)
    views = ranks.all()
    assert seed.report() == "all 5 ranks joined"
    assert {view.members for view in views} == {views[0].members}
    assert {view.secret for view in views} == {views[0].secret}
    for rank, view in enumerate(views):
        assert (view.rank, view.size, view.job, view.incarnation) == (rank, 5, seed.job, 0)
        assert view.cards == [b"card %d" % r for r in range(5)]
        assert view.members[rank].pid == os.getpid()
        assert view.members[rank].address == host


def test_every_rank_gets_a_certificate_that_names_it(make_seed: MakeSeed) -> None:
    seed, ranks = make_seed(3, tls=True)
    now = datetime.datetime.now(datetime.UTC)
    for rank, view in enumerate(ranks.all()):
        assert view.identity is not None
        name = verified_name(view.identity.certificate_pem, view.identity.ca_pem, now)
        assert (name.job, name.rank, name.incarnation) == (seed.job, rank, 0)


def test_ranks_can_talk_tls_with_their_certificates(make_seed: MakeSeed, tmp_path: Path) -> None:
    """As the engine uses them: TLS 1.3 with both sides authenticated; an outsider is refused (T1)."""
    _, ranks = make_seed(2, tls=True)
    views = ranks.all()
    identities = [view.identity for view in views if view.identity is not None]
    foreign = Authority("cd" * 16, datetime.datetime.now(datetime.UTC))

    def context(side: int, certificate: bytes, key: bytes) -> ssl.SSLContext:
        made = ssl.SSLContext(side)
        made.check_hostname = False
        made.verify_mode = ssl.CERT_REQUIRED
        made.load_verify_locations(cadata=identities[0].ca_pem.decode())
        file = tmp_path / secrets.token_hex(4)
        file.write_bytes(key + certificate)
        made.load_cert_chain(file)
        return made

    server = context(ssl.PROTOCOL_TLS_SERVER, identities[0].certificate_pem, identities[0].key_pem)
    for certificate, key, is_welcome in (
        (identities[1].certificate_pem, identities[1].key_pem, True),
        (foreign.certificate_pem, foreign.key_pem(), False),
    ):
        ours, theirs = socket.socketpair()
        with ThreadPoolExecutor(1) as pool, ours, theirs:
            accepted = pool.submit(server.wrap_socket, theirs, True)
            with context(ssl.PROTOCOL_TLS_CLIENT, certificate, key).wrap_socket(ours):
                if is_welcome:
                    accepted.result(PATIENCE_S).close()
                else:
                    with pytest.raises(ssl.SSLError):
                        accepted.result(PATIENCE_S)


def test_a_rank_that_gave_up_may_come_again(make_seed: MakeSeed, tls: bool) -> None:
    _, ranks = make_seed(2, tls=tls)
    with pytest.raises(RendezvousError, match="missing: 0"):
        ranks.start(1, timeout=0.5).result(PATIENCE_S)
    views = ranks.all()
    assert [view.incarnation for view in views] == [0, 1]
    assert [member.incarnation for member in views[0].members] == [0, 1]


def test_a_name_with_two_families_is_tried_in_both(
    make_seed: MakeSeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed, ranks = make_seed(1)
    port = seed.ticket.address.port
    six = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0))
    four = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [six, four])
    ticket = seed.ticket.at(Address("node7", port))
    with pytest.raises(UsageError, match="without a certificate"):
        TicketSource(ticket.text()).read()
    source = TicketSource(ticket.text(), insecure=True)
    assert ranks.start(0, source=source).result(PATIENCE_S).size == 1


def test_a_seed_advertised_beyond_the_host_is_encrypted() -> None:
    with Seed(1, version=VERSION, address=Address("127.0.0.1"), advertise=Address("gate.example", 9)) as seed:
        assert not seed.ticket.is_plain
        assert seed.ticket.address == Address("gate.example", 9)


def test_an_advertised_address_stands_in_the_ticket(make_seed: MakeSeed) -> None:
    seed, ranks = make_seed(1, address=Address("127.0.0.1"), advertise=Address("127.0.0.2", 0), tls=True)
    assert seed.ticket.address.host == "127.0.0.2"
    assert seed.local_ticket.address == Address("127.0.0.1", seed.ticket.address.port)
    source = TicketSource(seed.local_ticket.text())
    assert ranks.start(0, source=source).result(PATIENCE_S).size == 1


# -- exposure (T2, T16) ------------------------------------------------------------------------------------


def listening() -> set[str]:
    """Local addresses of the listening TCP sockets of this process."""
    inodes = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f"/proc/self/fd/{entry}"))
    found = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if f"socket:[{columns[9]}]" in inodes:
                found.add(f"{table} {columns[1]} {columns[3]}")
    return found


def test_the_seed_opens_one_socket_on_loopback_and_ranks_keep_none(make_seed: MakeSeed) -> None:
    before = listening()
    seed, ranks = make_seed(3)
    port = seed.ticket.address.port
    assert listening() - before == {f"tcp 0100007F:{port:04X} 0A"}
    ranks.all()
    deadline = time.monotonic() + PATIENCE_S
    while listening() - before != {f"tcp 0100007F:{port:04X} 0A"}:  # closed connections disappear at once
        assert time.monotonic() < deadline, listening() - before
    seed.close()
    assert listening() - before == set()


def test_a_wildcard_needs_an_address_to_advertise_and_tls(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UsageError, match="ranks do not know which one to join"):
        Seed(1, version=VERSION, address=Address("0.0.0.0"))
    with pytest.raises(UsageError, match="wildcard"):
        Seed(1, version=VERSION, address=Address("0.0.0.0"), advertise=Address("h"), insecure=True)
    assert caplog.text == ""


def test_an_unencrypted_seed_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    # A documentation address, which no interface here has: binding fails, after the warning.
    with pytest.raises(RendezvousError, match="cannot listen"):
        Seed(1, version=VERSION, address=Address("192.0.2.99"), insecure=True)
    assert "insecure: ranks join and talk without encryption" in caplog.text


def test_a_port_in_use_is_named_in_the_error(make_seed: MakeSeed) -> None:
    seed, _ = make_seed(1)
    with pytest.raises(
        RendezvousError, match=rf"127\.0\.0\.1:{seed.ticket.address.port}: the port is in use"
    ):
        Seed(1, version=VERSION, address=Address("127.0.0.1", seed.ticket.address.port))


def test_old_tls_and_other_protocols_are_refused(make_seed: MakeSeed) -> None:
    seed, ranks = make_seed(2, tls=True)
    with pytest.raises(ssl.SSLError), connected(seed) as sock:
        with_tls(sock, alpn=protocol.ALPN, maximum=ssl.TLSVersion.TLSv1_2)
    for options in ({}, {"alpn": "h2"}):
        with connected(seed) as sock, with_tls(sock, **options) as line:
            assert is_closed_by_seed(line)
    with connected(seed) as sock, with_tls(sock, alpn=protocol.ALPN) as line:
        line.sendall(b"UNISONO0" + bytes(32))
        assert is_closed_by_seed(line)
    assert seed.counts["garbage"] == 4
    assert len(ranks.all()) == 2


# -- ranks that do not fit (T6, T11) -----------------------------------------------------------------------


def test_of_two_that_claim_a_rank_exactly_one_wins(make_seed: MakeSeed, tls: bool) -> None:
    _, ranks = make_seed(3, tls=tls)
    claims = [ranks.start(2) for _ in range(3)]
    others = [ranks.start(0), ranks.start(1)]
    ends = [claim.exception(PATIENCE_S) for claim in claims]
    refused = [end for end in ends if end is not None]
    assert len(refused) == 2
    for error in refused:
        assert re.search(r"refused rank 2 of 3: .*rank 2 \(host .*, pid \d+, from 127\.0\.0\.1\)", str(error))
    assert [future.result(PATIENCE_S).rank for future in others] == [0, 1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": "0.9"}, "unisono 0.9 cannot join a world of unisono 1.0"),
        ({"size": 4}, "it was started with size 4, this world has 2 ranks"),
        ({"rank": 7, "size": 2}, "rank 7; allowed: 0 to 1"),
        (
            {"config": Config(eager_bytes=1)},
            r"settings differ from rank 0's: eager_bytes=1 \(rank 0: 16384\)",
        ),
    ],
)
def test_a_rank_that_does_not_fit_is_refused_by_name_and_the_world_forms(
    make_seed: MakeSeed, tls: bool, changes: dict[str, Any], reason: str
) -> None:
    seed, ranks = make_seed(2, tls=tls)
    first = ranks.start(0)
    with pytest.raises(RendezvousError, match=reason):
        ranks.start(**{"rank": 1, **changes}).result(PATIENCE_S)
    assert not first.done()
    assert re.search(reason, seed.report())
    assert ranks.start(1).result(PATIENCE_S).size == 2
    assert first.result(PATIENCE_S).size == 2


def test_a_certificate_request_that_is_none_is_refused(make_seed: MakeSeed) -> None:
    seed, ranks = make_seed(2, tls=True)
    sock, frames = authenticated(seed)
    body = protocol.encode(a_request(csr=b"\x30\x03\x02\x01\x00"))
    with sock:
        sock.sendall(frames.seal(body) + body)
        reply = first_reply(sock, frames)
    assert isinstance(reply, protocol.Refused)
    assert "certificate request is malformed" in reply.reason
    assert len(ranks.all()) == 2


def test_a_rank_that_joins_late_is_told_why(make_seed: MakeSeed, tls: bool) -> None:
    _, ranks = make_seed(2, tls=tls)
    ranks.all()
    with pytest.raises(RendezvousError, match=r"world of 2 ranks is complete, and rank 1 \(host"):
        ranks.start(1).result(PATIENCE_S)


def test_a_late_process_with_a_slow_seed_is_not_taken_for_an_older_one(
    tmp_path: Path, make_seed: MakeSeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The world was complete before this process came, so the next world may be its own: it keeps trying."""
    seed, ranks = make_seed(2)
    began = time.monotonic()
    ranks.all()
    source = TicketSource(str(tmp_path / "ticket"))
    source.write(seed.ticket)
    read = protocol.parse_reply
    # Longer than the time for which the world has been complete.
    delay_s = time.monotonic() - began + 0.5

    def read_late(body: bytes) -> protocol.Reply:
        time.sleep(delay_s)
        return read(body)

    monkeypatch.setattr(protocol, "parse_reply", read_late)
    monkeypatch.setattr("socket.gethostname", lambda: "another")  # else a known rank of that world
    deadline = RealRuntime().deadline(1.5 * delay_s)
    with pytest.raises(RendezvousError, match=r"could not join within .* refused it: .* is complete"):
        join(source, rank=1, size=2, card=b"", config=Config(), version="1.0", deadline=deadline)


# -- logs and secrets (T15) --------------------------------------------------------------------------------


@pytest.mark.parametrize("evil", ["a\nWARNING all is well", "\x1b[2J", "\u202egnp.exe", "h" * 60_000])
def test_a_strange_host_name_is_one_log_line(
    make_seed: MakeSeed, caplog: pytest.LogCaptureFixture, evil: str
) -> None:
    seed, _ = make_seed(2)
    sock, frames = authenticated(seed)
    body = protocol.encode(a_request(version="0.9", host=evil))
    with sock:
        sock.sendall(frames.seal(body) + body)
        reply = first_reply(sock, frames)
    assert isinstance(reply, protocol.Refused)
    (record,) = [r for r in caplog.records if "join refused" in r.getMessage()]
    assert record.getMessage().isprintable()
    assert len(record.getMessage()) < 1000
    assert seed.report().isprintable()


def test_no_secret_is_ever_logged_or_shown(make_seed: MakeSeed, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    seed, ranks = make_seed(2, tls=True)
    wrong = TicketSource(Ticket.create(seed.ticket.address, seed.ticket.ca_fingerprint).text())
    errors = [str(ranks.start(1, source=wrong).exception(PATIENCE_S)), seed.report()]
    views = ranks.all()
    identity = views[0].identity
    assert identity is not None
    shown = caplog.text + repr((seed, seed.ticket, views, identity, ranks._source)) + "".join(errors)
    key_lines = identity.key_pem.decode().splitlines()[1:-1]
    for secret in (seed.ticket.token.hex(), views[0].secret.hex(), *key_lines, "PRIVATE"):
        assert secret not in shown
    for secret_bytes in (seed.ticket.token, views[0].secret):
        assert repr(secret_bytes)[2:-1] not in shown
