"""What `config/` offers is what the daemon has: variables, metrics, permissions, times. Each file is checked as far as the
standard library can read it; the quadlet generator has its say in tests/image."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import fields

from armcore_trio.commands.review_log import _ADDS_TO
from armcore_trio.demo.embedded import Nats
from armcore_trio.exchange.books import books
from armcore_trio.exchange.inbox import Inbox
from armcore_trio.settings import DSN, SEED, URL, Settings, load
from tests.conftest import StartDaemon
from tests.support.credentials import new_seed, public_key
from tests.support.database import Database
from tests.support.waiting import wait_until

CONFIG = Path(__file__).parent.parent / "config"
DEFAULTS = Settings()
VARIABLES = [field.metadata["env"] for field in fields(Settings)]

ENV_FILE = (CONFIG / "armcore-trio.env").read_text()
COMPOSE = (CONFIG / "compose.yaml").read_text()
NATS_CONF = (CONFIG / "nats.conf").read_text()
QUADLET = (CONFIG / "quadlet" / "armcore-trio@.container").read_text()
PROMETHEUS = (CONFIG / "prometheus-alerts.yml").read_text()
OPERATIONS = (CONFIG.parent / "docs" / "operations.md").read_text()
DASHBOARD = json.loads((CONFIG / "grafana-dashboard.json").read_text())


def expressions() -> list[str]:
    """All PromQL of the alerts and the dashboard."""
    queries = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return [*re.findall(r"^ +expr: (.+)$", PROMETHEUS, re.MULTILINE), *queries]


def unit() -> dict[str, dict[str, list[str]]]:
    """Section → key → its values, of the quadlet unit."""
    sections: dict[str, dict[str, list[str]]] = {}
    current: dict[str, list[str]] = {}
    for line in QUADLET.splitlines():
        if line.startswith("["):
            current = sections.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            current.setdefault(key, []).append(value)
    return sections


def test_the_env_file_has_every_variable_once_with_its_default() -> None:
    lines = re.findall(r"^#?([A-Z][A-Z0-9_]+)=(.*)$", ENV_FILE, re.MULTILINE)
    given = dict(lines)
    assert sorted(name for name, _ in lines) == sorted(VARIABLES)
    assert load({**given, DSN: "dbname=core"}) == load({DSN: "dbname=core"})
    missing = {name for name, default in lines if not default}
    assert missing == {"OPENBAO__NATS__NATS_SEED", "OPENBAO__NATS__NATS_JWT", "OPENBAO__NATS__NATS_CA_FILE"}
    load({DSN: given[DSN]})


def test_the_env_file_as_it_is_sets_nothing_and_is_read_alike_by_podman_and_systemd() -> None:
    for line in ENV_FILE.splitlines():
        assert not line or line.startswith("#"), "a value here would win over the secret or the image's own"
    for line in re.findall(r"^#[A-Z][A-Z0-9_]+=.*$", ENV_FILE, re.MULTILINE):
        assert not re.search(r"[\"'\\]|\s#", line)


def test_each_file_names_only_variables_that_exist() -> None:
    for text in (ENV_FILE, COMPOSE, QUADLET, NATS_CONF):
        assert set(re.findall(r"\bOPENBAO__\w+", text)) <= set(VARIABLES)
    for text in (COMPOSE, QUADLET):
        assert DSN in text
        assert URL in text


def test_nobody_kills_before_the_grace_has_passed() -> None:
    (stop,) = re.findall(r"--stop-timeout=(\d+)", QUADLET)
    (kill,) = unit()["Service"]["TimeoutStopSec"]
    assert DEFAULTS.shutdown_grace_seconds < int(stop) < int(kill)
    core = COMPOSE.partition("\nservices:")[0]
    (grace,) = re.findall(r"stop_grace_period: (\d+)s", core)
    assert DEFAULTS.shutdown_grace_seconds < int(grace)


def test_the_quadlet_unit_confines_the_container_and_keeps_secrets_out_of_it() -> None:
    container, service = unit()["Container"], unit()["Service"]
    assert container["ReadOnly"] == container["NoNewPrivileges"] == ["true"]
    assert container["DropCapability"] == ["all"]
    assert container["HealthOnFailure"] == ["kill"]
    assert container["HealthCmd"] == ["armcore-trio probe --live"], "an outage of a server is no reason to kill"
    assert service["Restart"] == ["always"]
    assert service["RestartPreventExitStatus"] == ["78"]
    assert "Environment" not in container
    targets = {secret.rpartition("target=")[2] for secret in container["Secret"]}
    assert targets == {DSN, URL, SEED}


def test_the_compose_file_confines_its_containers() -> None:
    core, services = COMPOSE.split("\nservices:\n")
    for promised in ("read_only: true", "cap_drop: [ALL]", "no-new-privileges:true", "test: [CMD, armcore-trio, probe]"):
        assert promised in core
    assert services.count("<<: *core") == 3
    assert "depends_on" not in COMPOSE


def test_alerts_and_dashboard_ask_for_metrics_that_there_are(start_daemon: StartDaemon) -> None:
    text = start_daemon().wait_ok().get("/metrics")[1]
    metrics = set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE))
    tasks = set(re.findall(r'armcore_task_running\{task="([^"]+)"\}', text))
    used = {name for expression in expressions() for name in re.findall(r"\barmcore_\w+", expression)}
    assert used == metrics
    for label, known in (("task", tasks | {task.partition(".")[0] for task in tasks}), ("event", _events())):
        selected = (re.findall(rf'{label}=~?"([^"]+)"', expression) for expression in expressions())
        named = {value for values in selected for joined in values for value in joined.split("|")}
        assert named <= known
        assert named


def test_every_alert_says_what_it_is_about() -> None:
    alerts = PROMETHEUS.split("- alert: ")[1:]
    assert len(alerts) > 8
    for alert in alerts:
        for part in ("expr:", "severity:", "summary:"):
            assert alert.count(part) == 1
    names = {alert.split()[0] for alert in alerts}
    told, _, at_night = OPERATIONS.partition("## At night")
    assert set(re.findall(r"^\| `(Armcore\w+)` \|", told, re.MULTILINE)) == names
    assert set(re.findall(r"`(Armcore\w+)`", at_night)) == names


def test_the_queries_for_the_night_run(db: Database) -> None:
    (queries,) = re.findall(r"```sql\n(-- 1.+?)```", OPERATIONS, re.DOTALL)
    job = db.insert_job(status="dlq", finished_at="now()")
    rows = [db.execute(query.replace("%", "%%")) for query in queries.split(";\n")[:-1]]
    assert len(rows) == 4
    assert rows[3] == [{"id": job.id}]


@pytest.fixture
def permitted() -> Iterator[tuple[Nats, str, str]]:
    """A server with nats.conf, its users' block in force; the seeds of the core and of a service."""
    core, service = new_seed(), new_seed()
    block = NATS_CONF[NATS_CONF.index("#authorization") :]
    text = re.sub(r"^#", "", block, flags=re.MULTILINE)
    text = text.replace("CORE_PUBLIC_KEY", public_key(core)).replace("SERVICE_PUBLIC_KEY", public_key(service))
    rest = "\n".join(line for line in NATS_CONF.splitlines() if not line.startswith(("#", "http")))
    with Nats(config=f"{rest}\n{text}") as server:
        yield server, core, service


@pytest.mark.req("R6")
def test_the_permissions_of_nats_conf_suffice(
    start_daemon: StartDaemon, permitted: tuple[Nats, str, str], dsn: str, db: Database
) -> None:
    server, core, service = permitted
    environment = {DSN: dsn, URL: server.url}
    daemon = start_daemon({**environment, SEED: core}).wait_ok()
    simulator = start_daemon({**environment, SEED: service}, "simulate", "--delay", "0")
    simulator.wait_for_event("simulator.listening")
    job = db.insert_job()
    wait_until(lambda: db.job(job)["status"] == "done", what=lambda: f"done: {daemon}\n{simulator}")
    simulator.wait_for_event("simulator.confirmed", outcome="applied")
    assert "Violation" not in server.log


def _events() -> set[str]:
    entries = {name for book in books(Inbox(1)).values() for name in (book.entered, *book.accounted)}
    return {"restarts", *entries, *(total for _, total in _ADDS_TO.values())}
