"""A terminal that hangs up asks for the stop like any other signal, unless the process was started to outlive it (R9)."""

from signal import SIGHUP, SIGTERM

import pytest

from tests.conftest import StartDaemon
from tests.support.daemon import DaemonProcess


@pytest.mark.req("N24")
@pytest.mark.parametrize("times", [1, 2])
def test_a_hang_up_is_a_stop_and_a_second_one_no_hurry(start_daemon: StartDaemon, times: int) -> None:
    daemon = start_daemon().wait_ok()
    for _ in range(times):
        daemon.send_signal(SIGHUP)
    assert daemon.wait_exit() == 0
    assert daemon.one("shutdown.started")["signal"] == "SIGHUP"
    assert daemon.one("shutdown.complete")["exit_code"] == 0
    assert not daemon.named("shutdown.hurried")


@pytest.mark.req("N24")
def test_any_other_signal_after_a_hang_up_hurries(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(SHUTDOWN_GRACE_SECONDS="60").wait_ok()
    daemon.send_signal(SIGHUP)
    daemon.wait_for_event("shutdown.started")
    daemon.send_signal(SIGTERM)
    assert daemon.wait_exit() in (0, 128 + SIGTERM)  # an idle stop may be over before the second signal comes


@pytest.mark.req("N24")
def test_who_was_started_to_outlive_its_terminal_does(environment: dict[str, str]) -> None:
    with DaemonProcess(environment, wrapper=("nohup",)) as daemon:
        daemon.wait_ok()
        daemon.send_signal(SIGHUP)
        daemon.send_signal(SIGTERM)
        assert daemon.wait_exit() == 0
        assert daemon.one("shutdown.started")["signal"] == "SIGTERM"


@pytest.mark.req("N24")
def test_a_simulated_service_stops_on_a_hang_up(start_daemon: StartDaemon) -> None:
    simulator = start_daemon(None, "simulate")
    simulator.wait_for_event("simulator.listening")
    simulator.send_signal(SIGHUP)
    assert simulator.wait_exit() == 0
    assert simulator.one("simulator.stopped")
