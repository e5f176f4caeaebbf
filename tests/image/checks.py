"""The image, built and run for real: `make image-test`. Plain `pytest` does not collect this file, since it needs podman.

Each container is run with all the hardening that the image promises to bear: no writable file system, not even for
temporary files, no capability, no new privileges.
"""

import json
import os
import re
import shlex
import shutil
import signal
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

import pytest
import trustme

from armcore_trio import __version__
from armcore_trio.borders.migrate import migrate
from armcore_trio.demo.embedded import Nats, Postgres
from armcore_trio.settings import CA_FILE, DSN, SEED, URL
from tests.image import build
from tests.image.podman import (
    GLOBAL_FLAGS,
    PACKAGES,
    RUN_FLAGS,
    Container,
    free_port,
    inspect_image,
    need,
    one_off,
    podman,
    podman_environment,
    run,
    tell,
)
from tests.support.credentials import new_seed, public_key
from tests.support.database import Database
from tests.support.servers import start_postgres
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(900)  # the first test builds

MAX_BYTES = 150_000_000
PASSWORD = "canary-5d1e0c"
GENERATORS = (os.environ.get("QUADLET", ""), "/usr/libexec/podman/quadlet", "/usr/lib/podman/quadlet")
QUADLET = next((path for path in GENERATORS if Path(path).is_file()), "")  # podman has it since 4.4

Start = Callable[..., Container]


@pytest.fixture(scope="module")
def base() -> str:
    need(PACKAGES)
    return build.base_image()


@pytest.fixture(scope="module")
def image(base: str) -> str:
    begin = time.monotonic()
    name = build.build(base)
    tell(f"built on {base} in {time.monotonic() - begin:.0f} s")
    return name


@pytest.fixture(scope="module")
def saved(image: str, base: str, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The image as others get it: its configuration, and as uncompressed archives the layers that the base has not."""
    directory = tmp_path_factory.mktemp("image")
    podman("save", "--quiet", "--format=docker-archive", f"--output={directory}/image.tar", image)
    with tarfile.open(directory / "image.tar") as archive:
        archive.extractall(directory, filter="data")
    (manifest,) = json.loads((directory / "manifest.json").read_text())
    of_the_base = len(inspect_image(base)["RootFS"]["Layers"])
    return [directory / name for name in (manifest["Config"], *manifest["Layers"][of_the_base:])]


@pytest.fixture
def seed() -> str:
    return new_seed()


@pytest.fixture
def nats(seed: str) -> Iterator[Nats]:
    """A server that lets in nobody but the holder of the seed."""
    with Nats(config=f"authorization {{ users: [ {{ nkey: {public_key(seed)} }} ] }}") as server:
        yield server


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    with start_postgres() as server:
        yield server


@pytest.fixture
def start(image: str, postgres: Postgres, nats: Nats, seed: str) -> Iterator[Start]:
    """Starts containers on this test's servers: `start("run")`, `start("simulate", NAME="value")`."""
    with ExitStack() as stack:

        def start(*command: str, options: tuple[str, ...] = (), **variables: str) -> Container:
            environment = {URL: nats.url, "HEALTH_BIND": f"127.0.0.1:{free_port()}", **variables}
            secrets = {DSN: postgres.dsn(password=PASSWORD), SEED: seed}
            return stack.enter_context(Container(image, *command, environment=environment, secrets=secrets, options=options))

        yield start


def test_it_says_what_it_is(image: str) -> None:
    found = inspect_image(image)
    labels = found["Labels"]
    assert labels["org.opencontainers.image.title"] == "armcore-trio"
    assert labels["org.opencontainers.image.version"] == __version__
    revision = run("git", "-C", str(build.ROOT), "rev-parse", "HEAD", check=False).stdout.strip() or "unknown"
    assert labels["org.opencontainers.image.revision"].removesuffix("-dirty") == revision
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", found["User"])
    assert found["Config"]["Entrypoint"] == ["armcore-trio"]
    assert found["Config"]["Cmd"] == ["run"]
    assert found["Healthcheck"]["Test"] == ["CMD", "armcore-trio", "probe"]


def test_it_adds_less_than_150_mb_to_its_base(image: str, base: str) -> None:
    added = inspect_image(image)["Size"] - inspect_image(base)["Size"]
    tell(f"{added / 1e6:.1f} MB on top of the base")
    assert added < MAX_BYTES
    (told,) = re.findall(r": (\d+) MB on top of its base", (build.ROOT / "docs" / "operations.md").read_text())
    assert abs(int(told) - added / 1e6) < 5, "the operations guide tells another number"


def test_its_layers_hold_no_tools_no_caches_and_nothing_of_the_build(image: str, saved: list[Path]) -> None:
    names = {name for path in saved[1:] for name in run("tar", "--list", f"--file={path}").stdout.splitlines()}
    assert {name.split("/")[0] for name in names} <= {"opt", "usr", "etc", "run"}
    assert {name for name in names if re.match(r"(etc|run)/.", name)} <= {"etc/hosts"}  # where the build mounts one
    assert not [name for name in names if re.search(r"/(pip|setuptools|hatchling|wheel|pytest)(/|-[\d.]+\.dist)", name)]
    forbidden = [build.CANARY.encode(), *(host.encode() for host in build.package_hosts())]
    documents = [path.read_bytes() for path in saved]
    documents += [podman(*words, image).stdout.encode() for words in (("history", "--no-trunc"), ("image", "inspect"))]
    for document in documents:
        assert not [word for word in forbidden if word in document]
    tools = "import importlib.util as u, shutil as s; print([m for m in ('pip', 'ensurepip', 'setuptools') if u.find_spec(m)])"
    assert one_off(image, "-c", tools, program="python") == "[]\n"


def test_nothing_it_imports_is_compiled_at_each_start(image: str) -> None:
    program = (
        "import sys, pathlib, armcore_trio.cli, armcore_trio.daemon, armcore_trio.commands.probe\n"
        "files = {getattr(module, '__cached__', None) for module in sys.modules.values()} - {None}\n"
        "print(len(files) > 300, [file for file in files if not pathlib.Path(file).exists()])"
    )
    assert one_off(image, "-c", program, program="python") == "True []\n"


def test_without_settings_it_says_so_and_exits_78(image: str) -> None:
    with Container(image, environment={}, secrets={}) as container:
        assert container.wait_exit() == 78
        assert container.records.one("settings.invalid")["problems"].keys() == {DSN}


@pytest.mark.req("D9.1")
def test_on_an_empty_database_it_exits_69_unless_it_may_migrate(start: Start) -> None:
    assert start("run").wait_exit() == 69
    start("run", "--migrate").wait_healthy()


@pytest.mark.req("B57", "R9")
def test_a_job_travels_and_a_stop_leaves_nothing_behind(
    image: str, start: Start, postgres: Postgres, nats: Nats, seed: str
) -> None:
    migrate(postgres.dsn())
    begin = time.monotonic()
    core, _ = start("run"), start("simulate", "--delay", "0.05")
    core.wait_healthy()
    tell(f"healthy {time.monotonic() - begin:.1f} s after podman run")
    _assert_confined(core)

    database = Database(postgres.dsn())
    _travel(core, database)
    nats.stop()
    core.wait_healthy(False)
    nats.start()
    core.wait_healthy()
    _travel(core, database)
    database.close()

    daemon = core.pid
    inspected = core.inspect()
    del inspected["Config"]["Env"]  # podman shows a running container's own environment to those who may enter it anyway
    begin = time.monotonic()
    assert core.stop() == 0
    tell(f"stopped in {time.monotonic() - begin:.1f} s")
    assert not Path(f"/proc/{daemon}").exists()
    records = core.records
    story = [record["event"] for record in records.all[-9:]]
    assert "shutdown.started" in story
    assert records.all[-1]["event"] == "shutdown.complete"
    assert records.all[-1]["exit_code"] == 0
    assert {record["task"] for record in records.named("task.recovered")} == {"publisher", "subscriber.intake"}
    records.check()
    for document in (json.dumps(inspected), core.text):
        assert PASSWORD not in document
        assert seed not in document
    review = one_off(image, "review-log", stdin=core.text)
    assert "books of subscriber" in review
    assert "everything adds up" in review


@pytest.mark.req("B57")
def test_lame_duck_mode_moves_it_to_the_second_server(start: Start, postgres: Postgres, nats: Nats) -> None:
    migrate(postgres.dsn())
    with Nats(config=nats.config) as second:
        both = f"{nats.url},{second.url}"
        core, _ = start("run", ACK_TIMEOUT_SECONDS="1", **{URL: both}), start("simulate", "--delay", "0.05", **{URL: both})
        core.wait_healthy()
        database = Database(postgres.dsn())
        nats.signal("ldm")
        for _ in range(3):  # the first may go out before the service has moved too; it is repeated then
            _travel(core, database)
        core.wait_healthy()
        database.close()
        assert core.stop() == 0
        assert core.records.all[-1]["event"] == "shutdown.complete"


def test_a_ca_of_our_own_is_mounted(start: Start, postgres: Postgres, tmp_path: Path) -> None:
    migrate(postgres.dsn())
    authority, certificate = trustme.CA(), tmp_path / "server.pem"
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(certificate)
    mount, ca_file = f"--volume={tmp_path}/ca.pem:/etc/armcore-trio/nats-ca.pem:ro,z", "/etc/armcore-trio/nats-ca.pem"
    with Nats(config=f"tls {{ cert_file: {certificate}, key_file: {certificate} }}") as server:
        url = f"tls://127.0.0.1:{server.port}"
        start("run", options=(mount,), **{URL: url, CA_FILE: ca_file}).wait_healthy()


def test_the_check_of_the_quadlet_unit_kills_what_hangs_and_nothing_else(start: Start, postgres: Postgres, nats: Nats) -> None:
    """A server that is away is no reason: the daemon waits for it, and keeps what it has received."""
    migrate(postgres.dsn())
    (command,) = re.findall(
        r"^HealthCmd=(.+)$", (build.ROOT / "config/quadlet/armcore-trio@.container").read_text(), re.MULTILINE
    )
    options = (f"--health-cmd={command}", "--health-on-failure=kill", "--health-retries=1", "--health-timeout=6s")
    core = start("run", options=options)
    core.wait_ready(0)
    nats.stop()
    core.wait_ready(1)
    assert core.healthy
    nats.start()
    core.wait_ready(0)
    os.kill(core.pid, signal.SIGSTOP)
    assert not core.healthy
    assert core.wait_exit() == 137


def test_the_operations_guide_leads_to_a_healthy_probe(
    image: str, postgres: Postgres, nats: Nats, seed: str, tmp_path: Path
) -> None:
    """Its commands as they stand there, on names and a port of our own, and with the flags that this machine needs."""
    guide = (build.ROOT / "docs" / "operations.md").read_text()
    (block,) = re.findall(r"<!-- try: begin -->\n```sh\n(.+?)```\n<!-- try: end -->", guide, re.DOTALL)
    mark = f"test-{uuid4().hex}-"
    script = block.replace("config/", f"{shlex.quote(str(build.ROOT))}/config/").replace("/etc/", f"{tmp_path}/")
    script = re.sub(r"(?<=localhost/)armcore-trio\b(?!-)", image.rpartition("/")[2], script)
    script = re.sub(r"\barmcore-trio-(?=dsn|nats|1)", f"{mark}armcore-trio-", script)
    for name, content in (("dsn", postgres.dsn(password=PASSWORD)), ("nats-url", nats.url), ("nats-seed", seed)):
        (tmp_path / f"{name}.txt").write_text(f"{content}\n")
    flags = f"{shlex.join(RUN_FLAGS)} --env HEALTH_BIND=127.0.0.1:{free_port()}"
    shim = f"""podman() {{
        [ "$1" != run ] || {{ shift; set -- run {flags} "$@"; }}
        command podman {shlex.join(GLOBAL_FLAGS)} "$@"
    }}"""
    try:
        said = run("bash", "-euc", f"{shim}\n{script}", cwd=tmp_path, env=podman_environment()).stdout
    finally:
        podman("rm", "--force", "--time=0", f"{mark}armcore-trio-1", check=False)
        podman("secret", "rm", *(f"{mark}armcore-trio-{name}" for name in ("dsn", "nats-url", "nats-seed")), check=False)
    assert "schema: none -> " in said
    assert "nats: ok\ndatabase: ok\n" in said
    assert "status ok, nats ok, database ok\n" in said
    assert not list(tmp_path.glob("*.txt"))


if QUADLET:

    def test_the_quadlet_generator_accepts_the_units(tmp_path: Path) -> None:
        """What it makes of them is what the units promise."""
        for unit in (build.ROOT / "config" / "quadlet").iterdir():
            shutil.copy(unit, tmp_path)
        result = run("env", f"QUADLET_UNIT_DIRS={tmp_path}", QUADLET, "-dryrun")
        assert not re.search(r"unsupported|error|warning", result.stderr, re.IGNORECASE), result.stderr
        for promised in ("--read-only", "--cap-drop all", "--health-on-failure kill", "--secret", "RestartPreventExitStatus=78"):
            assert promised in result.stdout
        assert "podman run" in result.stdout


def _travel(core: Container, database: Database) -> None:
    """A job submitted inside the container ends as done."""
    submit = f"armcore-trio submit --json --bucket arm-ka --key {uuid4()} --name prices.xlsx --pipeline tabular"
    job = json.loads(core.execute(*submit.split()).stdout)
    status = "SELECT status FROM recognition_job WHERE id = %s"
    wait_until(lambda: database.value(status, job["job_id"]) == "done", 30, lambda: f"done; the log:\n{core.text}\n")


def _assert_confined(core: Container) -> None:
    """Process 1 of its container, not root, without privileges, and nowhere to write."""
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{core.pid}/status").read_text().splitlines())
    assert status["NSpid"].split()[-1] == "1"
    assert set(status["Uid"].split()) == {"65532"}
    assert set(status["Gid"].split()) == {"65532"}
    assert status["NoNewPrivs"] == "1"
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
    for directory in ("/", "/tmp", "/opt/armcore-trio", "/run"):  # noqa: S108 - inside the container
        written = core.execute("python", "-c", f"open({directory!r} + '/x', 'w')", check=False)
        assert "Read-only file system" in written.stderr or "Permission denied" in written.stderr
    assert "Read-only file system" in podman("exec", "--user=0", core.name, "python", "-c", "open('/x', 'w')", check=False).stderr
