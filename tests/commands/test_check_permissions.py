"""`check --connect` as a user who may not do all that the daemon does: never "ok" and then dead (N07, N17's neighbours)."""

import pytest

from armcore_trio.commands.check import _matches
from armcore_trio.demo.embedded import Nats
from tests.support.commands import run
from tests.support.servers import IMAGE_SUBJECT, RESULT_SUBJECT, TABULAR_SUBJECT, new_environment

SUBJECTS = {TABULAR_SUBJECT: "files.tabular", IMAGE_SUBJECT: "files.img", RESULT_SUBJECT: "files.parsed"}


def config(permissions: str) -> str:
    user = f"{{ user: core, password: core, permissions: {{ {permissions} }} }}"
    return f"authorization {{ users: [{user}] }}\nno_auth_user: core"


@pytest.mark.req("N07")
@pytest.mark.parametrize(
    ("permissions", "told"),
    [
        ("", None),
        ('publish: ["files.>", "$SYS.REQ.USER.INFO"], subscribe: ["files.parsed", "_INBOX.>"]', None),
        ('publish: ["files.*"], subscribe: ["files.parsed"]', None),
        ('publish: { deny: ["*.img"] }', "permissions violation for publish to files.img"),
        ('publish: { allow: ["files.img", "$SYS.>"] }', "permissions violation for publish to files.tabular"),
        ('publish: { deny: ["files.>"] }', "permissions violation for publish to files.tabular and to files.img"),
        ('subscribe: { deny: ["files.parsed"] }', 'permissions violation for subscription to "files.parsed"'),
    ],
)
def test_a_subject_that_is_refused_is_told(dsn: str, permissions: str, told: str | None) -> None:
    with Nats(config=config(permissions)) as nats:
        checked = run("check", "--connect", **(new_environment(dsn, nats.url) | SUBJECTS))
    (line,) = [line for line in checked.stdout.splitlines() if line.startswith("nats:")]
    assert checked.returncode == (69 if told else 0)
    assert line.endswith(told or "nats: ok")


@pytest.mark.req("N07")
@pytest.mark.parametrize(
    ("pattern", "meant"),
    [("a.b", True), ("a.*", True), ("*.b", True), (">", True), ("a.>", True), ("a.b.>", False), ("a", False), ("*", False)],
)
def test_patterns_of_subjects(pattern: str, meant: bool) -> None:
    assert _matches(pattern, "a.b") is meant
