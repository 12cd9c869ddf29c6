"""Finds the monitor of a rank's job, and starts one if there is none."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

from dash_inductor.untrusted import Refused, parse_json, read_regular

from . import wire
from .address import parse_address

log = logging.getLogger("dash_guard")

FOLDER, ADDRESS = "DASH_GUARD", "DASH_GUARD_ADDRESS"
"""Environment variables: the folder of the guard, and the address of its monitor."""

FILE = "monitor.json"
"""The file in the folder with the address and the secret of a monitor that a rank has started; only its owner can read
it.
"""

Found = tuple[tuple[str, int], str]


def run_name() -> str:
    """A name of the job that is equal on all ranks, and differs after a restart."""
    return "/".join(os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")) + (
        "/" + os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    )


def from_environment() -> Found | None:
    """Address and secret of the monitor that `dash-guard watch` hosts, from the environment; None without one."""
    address, secret = os.environ.get(ADDRESS), wire.secret_of(os.environ)
    return (parse_address(address), secret) if address and secret else None


def from_folder(folder: Path) -> Found | None:
    """Address and secret of the monitor that rank 0 of this job has started, from a file; None while there is none.

    Raises:
        OSError: the file cannot be read, or is damaged.
    """
    try:
        raw = parse_json(read_regular(folder / FILE, 4096), 64)
        if raw["run"] != run_name():
            return None
        return (str(raw["host"]), int(raw["port"])), str(raw["secret"])
    except FileNotFoundError:
        return None
    except (Refused, KeyError, TypeError, ValueError) as error:
        raise OSError(f"{folder / FILE}: {error}") from error


def publish(folder: Path, run: str, address: tuple[str, int], secret: str) -> Path:
    """Write the address and the secret of a monitor to a file in the folder, for other ranks.

    Args:
        folder: the folder of the guard.
        run: the name of the job, see `run_name`.
        address: host and port.
        secret: the secret that ranks must know.

    Returns:
        The path of the file.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, temporary = folder / FILE, folder / f".{FILE}.{os.getpid()}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        json.dump({"run": run, "host": address[0], "port": address[1], "secret": secret, "pid": os.getpid()}, file)
    os.replace(temporary, path)
    return path


def start_monitor(folder: Path) -> None:
    """Start a monitor in a process of its own, which outlives this process.

    Raises:
        OSError: the process cannot be started.
    """
    environment = {name: value for name, value in os.environ.items() if name not in (FOLDER, ADDRESS)}
    subprocess.Popen(
        [sys.executable, "-m", "dash_guard.monitor.standalone", os.fspath(folder), run_name(), str(os.getpid())],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
