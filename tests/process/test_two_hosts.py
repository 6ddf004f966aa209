"""Ranks on two hosts: every collective over TLS, with every kind of address; and the captured packets."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.hosts import Hosts, hosts
from tests.support.hosts_program import PATTERN
from tests.support.paths import SUPPORT

pytestmark = pytest.mark.more

__all__ = ["hosts"]

PROGRAM = str(SUPPORT / "hosts_program.py")
PATIENCE_S = 120


def run(
    hosts: Hosts, folder: Path, ranks: int, *options: str, backend: str = "native"
) -> list[subprocess.CompletedProcess[str]]:
    """Run the program on both hosts; the options are for node 0."""
    file = str(folder / "job.ticket")

    def node(number: int) -> subprocess.CompletedProcess[str]:
        words = ["-n", str(ranks), "--nnodes", "2", "--node-rank", str(number), "--join", file]
        words += [*options] if number == 0 else [word for word in options if word == "--insecure"]
        words += ["--backend", backend]
        command = hosts.command(number, "-m", "unisono", "run", *words, PROGRAM, str(folder))
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)

    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(node, (1, 0)))
    said = sorted(line for end in ends for line in end.stdout.splitlines())
    assert said == [f"[{r}] right {r}" for r in range(2 * ranks)], ends
    assert [end.returncode for end in ends] == [0, 0], ends
    return ends


def secrets(folder: Path) -> list[bytes]:
    """The token and the ranks' keys and secrets, in every form in which they might be sent."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    token = (folder / "ticket").read_text().rpartition("/")[2]
    found = [token.encode(), bytes.fromhex(token)]
    for file in folder.glob("key *"):
        pem = file.read_bytes()
        number = load_pem_private_key(pem, None).private_numbers().private_value  # type: ignore[union-attr]
        found += [number.to_bytes(32, "big"), pem.splitlines()[1]]
    for file in folder.glob("secret *"):
        found.append(file.read_bytes())
    return found


def test_captured_packets_reveal_no_secret(hosts: Hosts, tmp_path: Path) -> None:
    with hosts.captured(tmp_path / "capture"):
        ends = run(hosts, tmp_path, 2, "--address", hosts.interfaces[0])
    capture = (tmp_path / "capture").read_bytes()
    assert len(capture) > 2_000_000, "the data was captured"
    assert PATTERN not in capture
    hidden = secrets(tmp_path)
    assert len(hidden) == 2 + 4 * 3
    for secret in hidden:
        assert secret not in capture
    assert not [end.stderr for end in ends if "insecure" in end.stderr]


def test_insecure_logs_one_warning_and_sends_bytes_in_plain(hosts: Hosts, tmp_path: Path) -> None:
    with hosts.captured(tmp_path / "capture"):
        ends = run(hosts, tmp_path, 1, "--address", "10.77.0.1", "--insecure")
    capture = (tmp_path / "capture").read_bytes()
    assert PATTERN * 8 in capture, "secrets sent in plain are found in the capture"
    for secret in secrets(tmp_path):
        assert secret not in capture, "the token is not sent"
    assert sum(end.stderr.count("insecure") for end in ends) == 1, ends


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--address", "fd77::1"), id="ipv6"),
        pytest.param(("--address", "0.0.0.0", "--advertise", "10.77.0.1"), id="advertised"),
    ],
)
def test_every_collective_is_right_between_hosts(
    hosts: Hosts, tmp_path: Path, options: tuple[str, ...]
) -> None:
    run(hosts, tmp_path, 1, *options)


@pytest.mark.parametrize("address", ["fd77::1", "10.77.0.1"])
def test_quic_between_hosts_is_right_and_shows_nothing(hosts: Hosts, tmp_path: Path, address: str) -> None:
    with hosts.captured(tmp_path / "capture"):
        run(hosts, tmp_path, 2, "--address", address, backend="quic")
    capture = (tmp_path / "capture").read_bytes()
    assert len(capture) > 1_000_000, "the data was captured"
    assert PATTERN not in capture
    for secret in secrets(tmp_path):
        assert secret not in capture


def test_quic_to_an_advertised_address_is_right(hosts: Hosts, tmp_path: Path) -> None:
    run(hosts, tmp_path, 1, "--address", "0.0.0.0", "--advertise", "10.77.0.1", backend="quic")


def test_iroh_between_hosts_is_right_and_shows_nothing(hosts: Hosts, tmp_path: Path) -> None:
    with hosts.captured(tmp_path / "capture"):
        run(hosts, tmp_path, 1, "--address", "fd77::1", backend="iroh")
    capture = (tmp_path / "capture").read_bytes()
    assert len(capture) > 1_000_000, "the data was captured"
    assert PATTERN not in capture
