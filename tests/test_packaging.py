"""What a user installs works away from the repository: the wheel holds every file that is not Python."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from armcore_trio import __version__
from armcore_trio.borders.migrate import script
from armcore_trio.demo.embedded import Postgres
from armcore_trio.settings import DSN
from tests.support.servers import fresh_database

ROOT = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 60


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(directory), str(ROOT)]
    subprocess.run(command, check=True, cwd=directory, timeout=LIMIT_SECONDS)
    (built,) = directory.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel: Path) -> Path:
    """The wheel as an installer unpacks it, somewhere with a blank and a percent sign in its name."""
    target = wheel.parent / "100% in stalled"
    options = ["--no-deps", "--no-index", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(wheel)]
    subprocess.run(command, check=True, cwd=wheel.parent, timeout=LIMIT_SECONDS)
    return target


def run(site: Path, *arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python with the installed package before anything else on its path, and nothing of the environment's."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"} | variables
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=LIMIT_SECONDS, check=False)


def test_the_wheel_holds_the_package_and_no_more(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {"armcore_trio", f"armcore_trio-{__version__}.dist-info"}
    installed = {name.removeprefix("armcore_trio/") for name in names if name.startswith("armcore_trio/")}
    sources = {path.relative_to(ROOT / "armcore_trio") for path in (ROOT / "armcore_trio").rglob("*") if path.is_file()}
    sources |= {
        path.relative_to(ROOT) for folder in ("migrations", "schemas") for path in (ROOT / folder).rglob("*") if path.is_file()
    }
    assert installed == {path.as_posix() for path in sources if path.suffix != ".pyc"}
    assert {Path(name).suffix for name in installed} == {".py", ".sql", ".json", ".mako", ".typed"}


def test_the_wheel_says_what_it_needs(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    folder = f"armcore_trio-{__version__}.dist-info"
    metadata = archive.read(f"{folder}/METADATA").decode()
    assert f"Version: {__version__}" in metadata
    assert "Requires-Python: <3.14,>=3.11" in metadata
    assert "Provides-Extra: demo" in metadata
    assert "armcore-trio = armcore_trio.cli:main" in archive.read(f"{folder}/entry_points.txt").decode()
    assert f"{folder}/licenses/LICENSE" in archive.namelist()


def test_an_installed_package_is_the_one_that_runs(site: Path, tmp_path: Path) -> None:
    program = (
        "import armcore_trio as a, armcore_trio.resources as r; print(a.__file__, r.SCHEMAS, r.MIGRATIONS, r.SQL, sep='\\n')"
    )
    found = run(site, "-c", program, cwd=tmp_path)
    package = site / "armcore_trio"
    paths = [package / "__init__.py", package / "schemas", package / "migrations", package / "borders" / "sql"]
    assert found.stdout.splitlines() == [str(path) for path in paths], found.stderr
    assert all(path.exists() for path in paths)


def test_its_version(site: Path, tmp_path: Path) -> None:
    found = run(site, "-m", "armcore_trio", "--version", cwd=tmp_path)
    assert (found.returncode, found.stderr) == (0, "")
    assert __version__ in found.stdout


@pytest.mark.req("D9.1")
def test_its_migrations(site: Path, tmp_path: Path, postgres: Postgres) -> None:
    printed = run(site, "-m", "armcore_trio", "migrate", "--sql", cwd=tmp_path)
    assert (printed.returncode, printed.stderr) == (0, "")
    assert printed.stdout.strip() == script().strip()
    with fresh_database(postgres, "template1") as dsn:
        for _ in range(2):
            migrated = run(site, "-m", "armcore_trio", "migrate", cwd=tmp_path, **{DSN: dsn})
            assert (migrated.returncode, migrated.stderr) == (0, "")


def test_its_schemas(site: Path, tmp_path: Path) -> None:
    program = (
        "import json; from armcore_trio.protocol.messages import validator\n"
        "for name in ('recognition-request', 'recognition-result-message'):\n"
        "    print(json.dumps(sorted(validator(name).schema['required'])))"
    )
    found = run(site, "-c", program, cwd=tmp_path)
    assert found.stderr == ""
    required = [json.loads(line) for line in found.stdout.splitlines()]
    schemas = [
        json.loads((ROOT / "schemas" / f"{name}.schema.json").read_text())
        for name in ("recognition-request", "recognition-result-message")
    ]
    assert required == [sorted(schema["required"]) for schema in schemas]


def test_its_statements(site: Path, tmp_path: Path) -> None:
    """They are read when the module is."""
    found = run(site, "-c", "import armcore_trio.borders.store, armcore_trio.daemon", cwd=tmp_path)
    assert (found.returncode, found.stderr) == (0, "")


def test_its_source_distribution_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    """From an unpacked archive, without git."""
    program = "import sys; from hatchling.build import build_sdist; print(build_sdist(sys.argv[1]))"
    built = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=LIMIT_SECONDS,
        check=True,
    )
    archive = tmp_path / built.stdout.split()[-1]
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(tmp_path), str(archive)]
    subprocess.run(command, check=True, cwd=tmp_path, timeout=LIMIT_SECONDS)
    (again,) = tmp_path.glob("*.whl")
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())
