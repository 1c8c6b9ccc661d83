"""Run one host's part of a gang, detached from whoever started it.

    python3 -I -S supervisor.py start DIR    reads a JSON specification from stdin, starts the program
    python3 -I -S supervisor.py follow DIR   prints JSON lines: log, event, beat, notice, exit, lost
    python3 -I -S supervisor.py status DIR   prints running, exited, lost or absent
    python3 -I -S supervisor.py end DIR      TERM, KILL, and returns when every process of the attempt is gone
    python3 -I -S supervisor.py clear RELAY  ends what earlier tenants of some chips left; says whether they are free

DIR is `RELAY/runs/<run>/<attempt>`. One file of the standard library for Python 3.10, because that is what a
TPU VM has before anything is installed. All that another process must know stands in files of DIR:

    lock             held (flock) by the supervisor while it lives: no pid can be mistaken for it
    supervisor.json  who supervises; child.json: the program; both name processes by pid and start time
    log              what the program printed, secrets masked, whole lines
    events.jsonl     what the program says of itself
    notice.json      preemption is near; exit.json: how the program ended; ended.json: it must not run (again)
    tenant.json      which chips of this host are the attempt's, and the term of the lease by which they are

The specification (environment, secrets) is never written to disk and never part of a command line.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
F_SETPIPE_SZ = 1031

BEAT_S = 2.0
FOLLOW_POLL_S = 0.1
METADATA_POLL_S = 1.0
HTTP_TIMEOUT_S = 10.0
UPLOAD_EVERY_S = 10.0
UPLOAD_BACK_OFF_MAX_S = 60.0
PART_BYTES = 8 << 20
LINE_BYTES = 64 << 10
CHUNK_BYTES = 64 << 10
# Between two looks at everything else, a follower reads so much of one file.
ROUND_BYTES = 1 << 20
# An unfinished line is written after the first time of silence; a progress bar, each second time.
UNFINISHED_QUIET_S = 1.0
UNFINISHED_S = 10.0
# A spot VM has 30 s between the notice and its end; the rest is for the last words.
GRACE_S = 25.0
# What outlives the program it belongs to gets this time between TERM and KILL.
LEFTOVERS_S = 5.0
KILL_S = 10.0
# Storing the last words may delay the news of an exit by the first, the supervisor's end by the second.
LAST_WORDS_S = 2.0
FAREWELL_S = 30.0
END_FAREWELL_S = 5.0
SHORTEST_SECRET = 4
# What a process held is free a moment after its end; chips that stay busy for so long have another holder.
CHIPS_FREE_S = 3.0
# Device files of chips, in the order in which chips are numbered: v2 to v4, then v5 and later.
CHIP_DEVICES = "/dev/accel[0-9]*:/dev/vfio/[0-9]*"

REFUSED_ENDED, REFUSED_STALE, REFUSED_LEFTOVERS, REFUSED_BUSY, FAILED = 3, 4, 5, 6, 1

Json = dict[str, Any]


# --- small files ----------------------------------------------------------------------------------


def write_json(folder: str, name: str, value: Json) -> None:
    """Replace a file as a whole, so that a reader sees the old one or the new one."""
    path = os.path.join(folder, name)
    fd = os.open(f"{path}.{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(fd, "w") as file:
        json.dump(value, file)
    os.replace(f"{path}.{os.getpid()}", path)


def read_json(folder: str, name: str) -> Json | None:
    try:
        with open(os.path.join(folder, name)) as file:
            return json.load(file)
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def locked(folder: str, name: str) -> Iterator[None]:
    fd = os.open(os.path.join(folder, name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def supervised(folder: str) -> bool:
    """Whether the attempt's supervisor lives."""
    try:
        fd = os.open(os.path.join(folder, "lock"), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


# --- processes ------------------------------------------------------------------------------------


class Process(NamedTuple):
    pid: int
    state: str
    parent: int
    session: int
    start: int  # clock ticks since boot: with the pid, the identity of a process


def process(pid: int) -> Process | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses may hold spaces and parentheses.
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Process(pid, fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]))


def same(record: Json | None) -> Process | None:
    """The process that a record names, unless it is gone, a zombie, or its pid belongs to another one."""
    found = process(record["pid"]) if record else None
    return found if found and record and found.start == record["start"] and found.state != "Z" else None


def identity(pid: int) -> Json:
    found = process(pid)
    return {"pid": pid, "start": found.start if found else 0}


def carries(pid: int, marker: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return b"\0" + marker + b"\0" in b"\0" + file.read()
    except OSError:  # gone, or another user's
        return False


def gang_processes(folder: str) -> list[Process]:
    """Every living process of the attempt except for its supervisor and keeper.

    That is whoever carries the attempt's folder in its environment, is in the program's session, or descends
    from the supervisor (which adopts orphans). Emulated hosts share a machine, but never a folder.
    """
    marker = b"RELAY_ATTEMPT_DIR=" + os.fsencode(folder)
    who = read_json(folder, "supervisor.json") or {}
    child = read_json(folder, "child.json")
    supervisor, keeper = same(who.get("supervisor")), same(who.get("keeper"))
    spared = {os.getpid()} | {p.pid for p in (supervisor, keeper) if p}
    table = {p.pid: p for p in (process(int(n)) for n in os.listdir("/proc") if n.isdigit()) if p}
    session = None
    if child:
        leader = table.get(child["pid"])
        # A session's number is not given again while it has a process; a new leader is another session.
        session = child["pid"] if leader is None or leader.start == child["start"] else None
    ours: set[int] = {supervisor.pid} if supervisor else set()
    grown = True
    while grown:
        more = {p.pid for p in table.values() if p.parent in ours} - ours - spared
        ours |= more
        grown = bool(more)
    return [
        p
        for p in table.values()
        if p.state not in "ZX"
        and p.pid not in spared
        and (p.pid in ours or p.session == session or carries(p.pid, marker))
    ]


def send(target: Process, number: int) -> None:
    """Signal this very process; a newer one with the same pid is left alone."""
    try:
        fd = os.pidfd_open(target.pid)
    except ProcessLookupError:
        return
    try:
        found = process(target.pid)
        if found and found.start == target.start:
            signal.pidfd_send_signal(fd, number)
    except (ProcessLookupError, PermissionError):
        return  # gone meanwhile, or not ours to end: the caller looks again
    finally:
        os.close(fd)


def kill_all(folder: str, within_s: float) -> list[Process]:
    """KILL until none is left, seen twice since a process can fork while it is looked for; returns who is."""
    deadline = time.monotonic() + within_s
    clear = 0
    while True:
        left = gang_processes(folder)
        clear = 0 if left else clear + 1
        if clear == 2 or (left and time.monotonic() > deadline):
            return left
        for one in left:
            send(one, signal.SIGKILL)
        time.sleep(0.02)


def until_left(folder: str, within_s: float) -> bool:
    """Whether all processes of the attempt have left by themselves within that time.

    A look at all processes of the host takes milliseconds, of which a program that saves its last checkpoint has none
    to give: the host is searched again only when those that were found have left.
    """
    deadline = time.monotonic() + within_s
    while found := gang_processes(folder):
        if not until(lambda found=found: not any(lives(one) for one in found), deadline - time.monotonic()):
            return False
    return True


def lives(known: Process) -> bool:
    found = process(known.pid)
    return found is not None and found.start == known.start and found.state not in "ZX"


def until(true: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


# --- whose chips these are ------------------------------------------------------------------------


@contextlib.contextmanager
def tenancy(relay: str, exclusive: bool) -> Iterator[dict[str, int]]:
    """The newest term that was seen of each chip. A start looks (shared), a new tenant changes it (exclusive)."""
    fd = os.open(os.path.join(relay, "tenants.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield read_json(relay, "tenants.json") or {}
    finally:
        os.close(fd)


def newer_tenant(terms: dict[str, int], tenant: Json) -> str | None:
    """Why these chips are not this tenant's any more: others have come by a later lease."""
    newer = {c: terms[str(c)] for c in tenant["chips"] if terms.get(str(c), 0) > tenant["term"]}
    if not newer:
        return None
    told = ", ".join(f"chip {chip} by a lease of term {term}" for chip, term in newer.items())
    return f"others have {told}, and this one is of term {tenant['term']}"


def living_attempts(relay: str) -> list[str]:
    """Folders of attempts of which something lives."""
    runs = os.path.join(relay, "runs")
    marked, prefix = set(), b"RELAY_ATTEMPT_DIR=" + os.fsencode(runs) + b"/"
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            for entry in file.read().split(b"\0"):
                if entry.startswith(prefix):
                    marked.add(os.fsdecode(entry.partition(b"=")[2]))
    folders = [
        os.path.join(runs, run, name) for run in listed(runs) for name in listed(os.path.join(runs, run))
    ]
    return [folder for folder in folders if folder in marked or supervised(folder)]


def listed(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def chip_devices() -> list[str]:
    """Device files of this host's chips; none where the kernel shows none."""
    import glob
    import re

    for pattern in os.environ.get("RELAY_CHIP_DEVICES", CHIP_DEVICES).split(":"):
        if found := glob.glob(pattern):
            return sorted(found, key=lambda path: int(re.sub(r"\D", "", os.path.basename(path)) or 0))
    return []


def busy_chips(chips: list[int]) -> list[Json]:
    """Which of these chips some process holds, with its pid and command as far as we may see them."""
    devices = chip_devices()
    busy = {chip: devices[chip] for chip in chips if chip < len(devices) and is_busy(devices[chip])}
    holders = holders_of(set(busy.values())) if busy else {}
    return [{"chip": chip, "by": holders.get(device)} for chip, device in busy.items()]


def is_busy(device: str) -> bool:
    import errno

    try:
        fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        return error.errno == errno.EBUSY  # what we may not open tells nothing
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


def holders_of(devices: set[str]) -> dict[str, str]:
    """Of each device a process that has it open: its pid and the begin of its command."""
    found: dict[str, str] = {}
    for pid in (name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()):
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                if target in devices and target not in found:
                    with open(f"/proc/{pid}/cmdline", "rb") as file:
                        words = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
                    found[target] = f"pid {pid} ({words[:80]})"
    return found


def in_words(busy: list[Json]) -> str:
    return ", ".join(f"chip {one['chip']} is held by {one['by'] or 'an unknown process'}" for one in busy)


# --- the program's output -------------------------------------------------------------------------


def secret_forms(secrets: list[str]) -> list[bytes]:
    """Texts to mask, longest first: each line of each secret, and the whole in JSON, URLs and base64."""
    from urllib.parse import quote

    forms = set()
    for secret in secrets:
        whole = secret.strip()
        texts = [*whole.splitlines(), json.dumps(whole)[1:-1], quote(whole, safe="")]
        texts.append(base64.b64encode(whole.encode()).decode())
        forms |= {text.strip().encode() for text in texts if len(text.strip()) >= SHORTEST_SECRET}
    return sorted(forms, key=lambda form: (-len(form), form))


class LineLog:
    """Appends a program's output to a file line by line: masked, and in bounded memory.

    A line is what a terminal would show of it: text before a carriage return is overwritten. An unfinished
    line is held back for a moment, then written as a line of its own.
    """

    def __init__(self, path: str, secrets: list[str]) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._secrets = secret_forms(secrets)
        self._pending = b""
        self._fed = self._since = 0.0
        self._dropped = 0

    @property
    def unfinished(self) -> bool:
        return bool(self._pending)

    def feed(self, data: bytes, now: float) -> None:
        if not self._pending:
            self._since = now
        self._fed = now
        whole, newline, self._pending = (self._pending + data).rpartition(b"\n")
        if newline:
            self._since = now
            self._write(self._shown(whole) + b"\n")
        # A carriage return at the very end may be the first half of a line's end.
        self._pending = self._pending[self._pending.rfind(b"\r", 0, len(self._pending) - 1) + 1 :]
        if len(self._pending) > LINE_BYTES:
            self._cut()

    def tick(self, now: float) -> None:
        """Write an unfinished line that has waited long enough."""
        if self._pending and (now - self._fed >= UNFINISHED_QUIET_S or now - self._since >= UNFINISHED_S):
            self._since = now
            self._cut()

    def finish(self) -> None:
        if self._pending:
            self._write(self._mask(self._pending.strip(b"\r")) + b"\n")
            self._pending = b""

    def _cut(self) -> None:
        """Write the unfinished line, but for an end that may be the beginning of a secret."""
        text = self._mask(self._pending.strip(b"\r"))
        held = max((_overlap(text, secret) for secret in self._secrets), default=0)
        shown, self._pending = text[: len(text) - held], text[len(text) - held :]
        if shown:
            self._write(shown + b"\n")

    def _shown(self, lines: bytes) -> bytes:
        if b"\r" in lines:
            lines = b"\n".join(line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines.split(b"\n"))
        return self._mask(lines)

    def _mask(self, text: bytes) -> bytes:
        for secret in self._secrets:
            text = text.replace(secret, b"***")
        return text

    def _write(self, data: bytes) -> None:
        # A full disk costs log lines; it never stops the program.
        try:
            if self._dropped:
                os.write(
                    self._fd, b"[relay] %d bytes of output are lost: the disk was full\n" % self._dropped
                )
                self._dropped = 0
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:
            self._dropped += len(data)


def _overlap(text: bytes, secret: bytes) -> int:
    """Length of the longest end of `text` that begins `secret` without being all of it."""
    return next((n for n in range(min(len(secret) - 1, len(text)), 0, -1) if text.endswith(secret[:n])), 0)


# --- metadata server and bucket -------------------------------------------------------------------


class Web:
    """HTTP as the supervisor needs it: the metadata server, and small uploads to the bucket."""

    def __init__(self, environment: Json, metadata: str | None) -> None:
        host = metadata or environment.get("GCE_METADATA_HOST") or environment.get("GCE_METADATA_IP")
        self._metadata = f"http://{host or 'metadata.google.internal'}/computeMetadata/v1/instance/"
        self._storage = (environment.get("STORAGE_EMULATOR_HOST") or "https://storage.googleapis.com").rstrip(
            "/"
        )
        self._token, self._token_until = "", 0.0

    def preempted(self) -> bool:
        return self._ask("preempted", 3.0).strip().upper() == b"TRUE"

    def upload(self, url: str, data: bytes) -> None:
        """Store `data` as the object gs://bucket/name."""
        from urllib.parse import quote

        bucket, _, name = url[len("gs://") :].partition("/")
        headers = {"Content-Type": "text/plain; charset=utf-8"}
        if self._storage.startswith("https:"):
            headers["Authorization"] = f"Bearer {self._fresh_token()}"
        where = f"{self._storage}/upload/storage/v1/b/{quote(bucket)}/o"
        self._send(f"{where}?uploadType=media&name={quote(name, safe='')}", HTTP_TIMEOUT_S, headers, data)

    def _fresh_token(self) -> str:
        if time.monotonic() >= self._token_until:
            answer = json.loads(self._ask("service-accounts/default/token", 5.0))
            self._token, self._token_until = (
                answer["access_token"],
                time.monotonic() + answer["expires_in"] - 60,
            )
        return self._token

    def _ask(self, path: str, timeout_s: float) -> bytes:
        return self._send(self._metadata + path, timeout_s, {"Metadata-Flavor": "Google"}, None)

    @staticmethod
    def _send(url: str, timeout_s: float, headers: Json, data: bytes | None) -> bytes:
        import http.client
        import urllib.request

        # Plain HTTP is the metadata server or a local bucket: no proxy stands before them.
        handlers = [urllib.request.ProxyHandler({})] if url.startswith("http:") else []
        request = urllib.request.Request(url, data=data, headers=headers)
        try:
            with urllib.request.build_opener(*handlers).open(request, timeout=timeout_s) as answer:
                return answer.read()
        except (http.client.HTTPException, ValueError) as error:
            raise OSError(f"{url}: {error!r}") from error


class Uploader(threading.Thread):
    """Brings new parts of the log to the bucket; trouble there is waited out and disturbs nobody."""

    def __init__(self, web: Web, path: str, target: str, every_s: float) -> None:
        super().__init__(daemon=True)
        self._web, self._path, self._target, self._every_s = web, path, target, every_s
        self._wanted, self._lock = threading.Condition(), threading.Lock()
        self._now, self._part, self._offset = False, 0, 0

    def run(self) -> None:
        failures = 0
        while True:
            wait_s = min(UPLOAD_BACK_OFF_MAX_S, 2.0**failures) if failures else self._every_s
            with self._wanted:
                if not self._now:
                    self._wanted.wait(wait_s)
                self._now = False
            try:
                self._catch_up()
                failures = 0
            except (OSError, KeyError, ValueError) as error:
                failures += 1
                print(
                    f"upload of part {self._part} failed {failures} times: {error}",
                    file=sys.stderr,
                    flush=True,
                )

    def hurry(self) -> None:
        with self._wanted:
            self._now = True
            self._wanted.notify()

    def done(self) -> bool:
        """Whether all of the log is in the bucket."""
        return self._offset >= os.path.getsize(self._path)

    def _catch_up(self) -> None:
        with open(self._path, "rb") as file:
            while True:
                file.seek(self._offset)
                data = file.read(PART_BYTES)
                data = data[: data.rfind(b"\n") + 1]
                if not data:
                    return
                # The part's name is the same when it is tried again: a lost answer makes no second copy.
                self._web.upload(f"{self._target}-{self._part:06d}.log", data)
                self._part, self._offset = self._part + 1, self._offset + len(data)


# --- the supervisor -------------------------------------------------------------------------------


class Supervisor:
    """Starts the program and stays until all of it is gone. One thread acts; two others only look."""

    def __init__(self, folder: str, spec: Json) -> None:
        self._folder, self._spec = folder, spec
        self._environment = child_environment(folder, spec)
        self._log = LineLog(os.path.join(folder, "log"), spec.get("secrets", []))
        web = Web(self._environment, spec.get("metadata"))
        self._web = web
        self._uploader: Uploader | None = None
        if spec.get("log_target"):
            target = f"{spec['log_target'].rstrip('/')}/{spec['host']}"
            every_s = spec.get("upload_every_s", UPLOAD_EVERY_S)
            self._uploader = Uploader(web, os.path.join(folder, "log"), target, every_s)
        self._child: int | None = None
        self._status: int | None = None
        self._reason: str | None = None
        self._notice: str | None = None
        self._noticed = False
        self._kill_at: float | None = None
        self._sweep_until: float | None = None
        self._wake_read, self._wake_write = os.pipe()
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)

    def run(self, started: Callable[[], None]) -> None:
        """Returns when the program has ended and its last words are stored, or storing them took too long."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        output = self._spawn()
        started()
        if self._uploader:
            self._uploader.start()
        if self._spec.get("metadata") != "off":
            threading.Thread(target=self._watch_metadata, daemon=True).start()
        self._pump(output)
        self._log.finish()
        if self._uploader:
            self._uploader.hurry()
            until(self._uploader.done, LAST_WORDS_S)
        write_json(self._folder, "exit.json", self._exit_record())
        if self._uploader:
            until(self._uploader.done, FAREWELL_S)

    def _spawn(self) -> int | None:
        """Start the program; returns the read end of its output, or None if it could not be started."""
        parent, libc = os.getpid(), ctypes.CDLL(None)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

        def die_with_parent() -> None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)

        read, write = os.pipe()
        with contextlib.suppress(OSError):  # more room only saves switches
            fcntl.fcntl(write, F_SETPIPE_SZ, 1 << 20)
        argv = [expand(word, self._folder) for word in self._spec["argv"]]
        try:
            child = subprocess.Popen(
                argv,
                cwd=expand(self._spec.get("cwd") or "${HOME}", self._folder),
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=write,
                stderr=write,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        except OSError as error:
            self._reason = (
                f"cannot start {argv[0]!r} in {self._spec.get('cwd') or 'the home folder'}: {error}"
            )
            self._log.feed(f"[relay] {self._reason}\n".encode(), time.monotonic())
            self._status = 126 << 8 if isinstance(error, PermissionError) else 127 << 8
            os.close(read)
            return None
        finally:
            os.close(write)
        child.returncode = 0  # it is waited for below, with every orphan adopted
        self._child = child.pid
        write_json(self._folder, "child.json", identity(child.pid))
        os.set_blocking(read, False)
        return read

    def _pump(self, output: int | None) -> None:
        """Carry output to the log, and pass signals on, until no process of the attempt is left."""
        while True:
            if output is not None and not self._read(output):
                os.close(output)
                output = None
            now = time.monotonic()
            self._log.tick(now)
            self._reap()
            self._act_on_notice(now)
            if self._status is not None and self._sweep(now):
                break
            if self._kill_at is not None and now >= self._kill_at:
                kill_all(self._folder, 0.5)
            busy = self._status is not None or (self._kill_at is not None and now >= self._kill_at)
            timeout = 0.05 if busy else 0.5 if self._log.unfinished or self._kill_at else 5.0
            readable = [self._wake_read] if output is None else [self._wake_read, output]
            if self._wake_read in select.select(readable, [], [], timeout)[0]:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
        if output is not None:  # a process that hid from us may hold it open: what is there now, no more
            self._read(output, most=64)

    def _read(self, output: int, most: int = 16) -> bool:
        """Take what is there; False once every process has closed its end."""
        for _ in range(most):
            try:
                data = os.read(output, CHUNK_BYTES)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._log.feed(data, time.monotonic())
        return True

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._child:
                    self._status = status

    def _sweep(self, now: float) -> bool:
        """End what the program left behind; True when nothing of it lives."""
        left = gang_processes(self._folder)
        if not left:
            return True
        if self._sweep_until is None:
            ended = read_json(self._folder, "ended.json")
            # Who was told to stop keeps its time, also when the shell that started it has left at once.
            self._sweep_until = self._kill_at or now + max(LEFTOVERS_S, ended["grace_s"] if ended else 0.0)
            if not (ended or self._noticed):
                for one in left:
                    send(one, signal.SIGTERM)
        if now >= self._sweep_until:
            kill_all(self._folder, 0.5)
        return False

    def _act_on_notice(self, now: float) -> None:
        if self._notice is None or self._noticed or self._child is None or self._status is not None:
            return
        self._noticed = True
        with contextlib.suppress(OSError):  # a full disk must not keep the program from its checkpoint
            write_json(self._folder, "notice.json", {"t": time.time(), "source": self._notice})
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child, signal.SIGTERM)
        self._kill_at = now + float(self._spec.get("grace_s", GRACE_S))
        if self._uploader:
            self._uploader.hurry()

    def _on_sigterm(self, *_: object) -> None:
        self._notice = self._notice or "SIGTERM to the supervisor"

    def _watch_metadata(self) -> None:
        while True:
            with contextlib.suppress(OSError):  # no answer is no notice; the next second asks again
                if self._web.preempted():
                    self._notice = self._notice or "metadata server: preempted"
                    os.write(self._wake_write, b"n")
                    return
            time.sleep(METADATA_POLL_S)

    def _exit_record(self) -> Json:
        status = self._status or 0
        by_signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        code = None if by_signal else os.WEXITSTATUS(status)
        return {"code": code, "signal": by_signal, "reason": self._reason, "t": time.time()}


def expand(text: str, folder: str) -> str:
    """Put this host's own paths in: ${HOME} and ${RELAY_ATTEMPT_DIR}."""
    home = os.environ.get("HOME") or os.path.expanduser("~")
    return text.replace("${RELAY_ATTEMPT_DIR}", folder).replace("${HOME}", home)


def child_environment(folder: str, spec: Json) -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if k not in set(spec.get("unset", []))}
    # What a program prints must be in the log when it is killed a moment later.
    environment.setdefault("PYTHONUNBUFFERED", "1")
    environment.update({k: expand(v, folder) for k, v in spec.get("env", {}).items()})
    run, attempt = folder.split(os.sep)[-2:]
    environment["RELAY_ATTEMPT_ID"] = f"{run}/{attempt}"
    environment["RELAY_ATTEMPT_DIR"] = folder
    environment["RELAY_EVENTS"] = os.path.join(folder, "events.jsonl")
    if "config.json" in spec.get("files", {}):
        environment["RELAY_CONFIG"] = os.path.join(folder, "config.json")
    return environment


# --- commands -------------------------------------------------------------------------------------


def start(folder: str) -> int:
    """Start the attempt, or say that it was started before; earlier attempts of the run are ended first."""
    spec = json.load(sys.stdin)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    relay = os.path.dirname(os.path.dirname(os.path.dirname(folder)))
    with locked(folder, "start.lock"), tenancy(relay, exclusive=False) as terms:
        if read_json(folder, "ended.json") is not None:
            return answer(REFUSED_ENDED, error="this attempt was ended and is never started again")
        if read_json(folder, "supervisor.json") is not None:
            return answer(0, started=False, **describe(folder))
        tenant = spec.get("tenant")
        if tenant and (newer := newer_tenant(terms, tenant)):
            return answer(REFUSED_STALE, error=f"the lease is lost: {newer}")
        runs, own = os.path.dirname(folder), int(os.path.basename(folder))
        others = sorted(int(name) for name in os.listdir(runs) if name.isdigit() and int(name) != own)
        for other in others:
            path = os.path.join(runs, str(other))
            if other > own and read_json(path, "supervisor.json") is not None:
                return answer(
                    REFUSED_STALE, error=f"attempt {other} of this run was started here: {own} is over"
                )
            if other < own and (left := end_attempt(path, 0.0)):
                return answer(REFUSED_LEFTOVERS, error=f"attempt {other} cannot be ended, left: {left}")
        if tenant:
            if not until(lambda: not busy_chips(tenant["chips"]), CHIPS_FREE_S):
                busy = busy_chips(tenant["chips"])
                return answer(REFUSED_BUSY, error=f"Device or resource busy: {in_words(busy)}")
            write_json(folder, "tenant.json", tenant)
        for name, text in spec.get("files", {}).items():
            if os.path.basename(name) != name:
                return answer(FAILED, error=f"a file's name has no folder in it, found {name!r}")
            fd = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(fd, "w") as file:
                file.write(text)
        if not detach(folder, spec):
            return answer(FAILED, error=f"the supervisor died at its start: {last_error(folder)}")
    return answer(0, started=True, **describe(folder))


def detach(folder: str, spec: Json) -> bool:
    """Fork twice, so that the supervisor belongs to no session; True once it has started the program."""
    read, write = os.pipe()
    first = os.fork()
    if first == 0:
        try:
            os.setsid()
            if os.fork() == 0:
                become_supervisor(folder, spec, write)
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(first, 0)
    readable = select.select([read], [], [], 30.0)[0]
    return bool(readable) and os.read(read, 1) == b"1"


def become_supervisor(folder: str, spec: Json, reply: int) -> None:
    """The second fork's life. Never returns."""
    try:
        os.closerange(3, reply)
        os.closerange(reply + 1, 4096)
        null = os.open(os.devnull, os.O_RDWR)
        errors = os.open(
            os.path.join(folder, "supervisor.err"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
        )
        for fd, source in ((0, null), (1, null), (2, errors)):
            os.dup2(source, fd)
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        os.chdir("/")
        lock = os.open(os.path.join(folder, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        keeper, leash = start_keeper(folder, (lock, reply))
        write_json(
            folder, "supervisor.json", {"supervisor": identity(os.getpid()), "keeper": identity(keeper)}
        )

        def started() -> None:
            os.write(reply, b"1")
            os.close(reply)

        Supervisor(folder, spec).run(started)
        os.write(leash, b"1")
    except BaseException:  # whatever it was, it must be readable afterwards
        traceback.print_exc()
    finally:
        os._exit(0)


def start_keeper(folder: str, not_its: tuple[int, ...]) -> tuple[int, int]:
    """A tiny process that ends the gang should the supervisor be killed; returns its pid and its leash.

    The parent-death signal reaches the program itself only; whatever that has forked would live on.
    """
    read, leash = os.pipe()
    pid = os.fork()
    if pid:
        os.close(read)
        return pid, leash
    try:
        for fd in (*not_its, leash):
            os.close(fd)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        if os.read(read, 1) == b"":
            kill_all(folder, KILL_S)
    finally:
        os._exit(0)


def end(folder: str, grace_s: float) -> int:
    """End the attempt and say whether all of it is gone. An attempt ended before its start never starts."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    left = end_attempt(folder, grace_s)
    return answer(1 if left else 0, confirmed=not left, left=left, **describe(folder))


def end_attempt(folder: str, grace_s: float) -> list[int]:
    """TERM, wait, KILL, wait for the supervisor's last words; returns the pids that are left."""
    with locked(folder, "start.lock"):
        if read_json(folder, "ended.json") is None:
            write_json(folder, "ended.json", {"t": time.time(), "grace_s": grace_s})
    if grace_s > 0:
        for one in gang_processes(folder):
            send(one, signal.SIGTERM)
        until_left(folder, grace_s)
    kill_all(folder, KILL_S)
    who = read_json(folder, "supervisor.json") or {}
    until(lambda: not supervised(folder), END_FAREWELL_S)
    for record in (who.get("supervisor"), who.get("keeper")):
        # The keeper leaves by itself once the supervisor has; it is the one to clear up if that was killed.
        if until(lambda record=record: same(record) is None, 0.0 if record is who.get("supervisor") else 2.0):
            continue
        if stuck := same(record):
            send(stuck, signal.SIGKILL)
            until(lambda record=record: same(record) is None, 2.0)
    left = [one.pid for one in kill_all(folder, KILL_S)]
    return left + [who[role]["pid"] for role in ("supervisor", "keeper") if same(who.get(role))]


def clear(relay: str, term: int, chips: list[int]) -> int:
    """Make chips free for who has them by a lease of `term`: what earlier tenants left is ended, and may not start.

    What is no attempt of ours is never ended: chips that it holds are told as busy.
    """
    os.makedirs(relay, mode=0o700, exist_ok=True)
    with tenancy(relay, exclusive=True) as terms:
        if newer := newer_tenant(terms, {"term": term, "chips": chips}):
            return answer(REFUSED_STALE, error=f"the lease is lost: {newer}")
        write_json(relay, "tenants.json", terms | {str(chip): term for chip in chips})
    ended, left = [], []
    for folder in living_attempts(relay):
        tenant = read_json(folder, "tenant.json")
        if tenant is None or (tenant["term"] < term and set(tenant["chips"]) & set(chips)):
            left += end_attempt(folder, 0.0)
            ended.append("/".join(folder.split(os.sep)[-2:]))
    until(lambda: not busy_chips(chips), CHIPS_FREE_S)
    busy = busy_chips(chips)
    code = 1 if left or busy else 0
    return answer(code, confirmed=not left, free=not busy, left=left, ended=ended, busy=in_words(busy))


def describe(folder: str) -> Json:
    """What is known of the attempt on this host."""
    alive = supervised(folder)  # looked at first: an exit code written meanwhile is seen below
    exit_record = read_json(folder, "exit.json")
    if exit_record:
        state = "exited"
    elif alive:
        state = "running"
    else:
        state = "absent" if read_json(folder, "supervisor.json") is None else "lost"
    ended = read_json(folder, "ended.json")
    return {
        "state": state,
        "exit": exit_record,
        "notice": read_json(folder, "notice.json"),
        # Not of a program that had ended by itself before: that exit is its own.
        "ended": ended is not None and not (exit_record and exit_record["t"] < ended.get("t", 0.0)),
    }


class Tail:
    """Reads whole lines of a growing file from an offset on."""

    def __init__(self, path: str, offset: int) -> None:
        self._path, self.offset = path, offset

    def lines(self, last: bool) -> Iterator[tuple[bytes, int]]:
        """New lines with the offset behind each; with `last`, an unfinished one, too."""
        try:
            file = open(self._path, "rb")  # noqa: SIM115
        except FileNotFoundError:
            return
        with file:
            file.seek(self.offset)
            until = self.offset + ROUND_BYTES
            for line in file:
                if not last and (self.offset > until or not line.endswith(b"\n")):
                    return
                self.offset += len(line)
                yield line.rstrip(b"\n"), self.offset


def follow(folder: str, log_offset: int, event_offset: int) -> int:
    """Print what happens from the offsets on, until the program has ended or its supervisor is lost."""
    log = Tail(os.path.join(folder, "log"), log_offset)
    events = Tail(os.path.join(folder, "events.jsonl"), event_offset)
    out = sys.stdout
    beat_at, noticed = 0.0, False

    def say(**record: Any) -> None:
        nonlocal beat_at
        out.write(json.dumps(record) + "\n")
        beat_at = time.monotonic() + BEAT_S

    while True:
        about = describe(folder)  # before the files: what was written before an exit is then read below
        over = about["state"] != "running"
        for line, offset in log.lines(over):
            say(k="log", line=line.decode(errors="replace"), o=offset)
        for line, offset in events.lines(over):
            with contextlib.suppress(ValueError):  # cut off by a kill
                record = json.loads(line)
                if isinstance(record, dict):
                    say(k="event", record=record, o=offset)
        if about["notice"] and not noticed:
            noticed = True
            say(k="notice", **about["notice"])
        if about["state"] == "exited":
            say(k="exit", **about["exit"])
        elif over:
            absent = about["state"] == "absent"
            why = "was never started here" if absent else "has lost its supervisor, and so its exit code"
            say(k="lost", absent=absent, reason=f"attempt {os.path.basename(folder)} {why}")
        elif time.monotonic() >= beat_at:
            say(k="beat")
        out.flush()
        if over:
            return 0
        time.sleep(FOLLOW_POLL_S)


def answer(code: int, **record: Any) -> int:
    print(json.dumps(record), flush=True)
    return code


def last_error(folder: str) -> str:
    try:
        with open(os.path.join(folder, "supervisor.err"), errors="replace") as file:
            return (file.read().strip().splitlines() or ["no message"])[-1]
    except FileNotFoundError:
        return "no message"


def main(arguments: list[str]) -> int:
    import argparse

    parser = argparse.ArgumentParser(description="Run one host's part of a gang.")
    parser.add_argument("command", choices=["start", "follow", "status", "end", "clear"])
    parser.add_argument(
        "folder", help="the attempt's folder on this host: …/RUN/ATTEMPT; for clear, …/.relay"
    )
    parser.add_argument("--log-offset", type=int, default=0, help="bytes of the log that are known")
    parser.add_argument("--event-offset", type=int, default=0, help="bytes of the events that are known")
    parser.add_argument("--grace", type=float, default=0.0, help="seconds between TERM and KILL")
    parser.add_argument("--term", type=int, default=0, help="of the lease by which chips are had")
    parser.add_argument("--chips", default="", help="numbers of chips of this host, with commas")
    chosen = parser.parse_args(arguments)
    os.umask(0o077)
    folder = os.path.abspath(os.path.expanduser(chosen.folder))
    if chosen.command == "clear":
        return clear(folder, chosen.term, [int(chip) for chip in chosen.chips.split(",") if chip])
    if not os.path.basename(folder).isdigit():
        parser.error(f"the folder's last part is the number of the attempt, found {folder!r}")
    if chosen.command == "start":
        return start(folder)
    if chosen.command == "end":
        return end(folder, chosen.grace)
    if chosen.command == "status":
        return answer(0, **describe(folder))
    try:
        return follow(folder, chosen.log_offset, chosen.event_offset)
    except BrokenPipeError:
        os._exit(0)  # nobody listens any more


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
