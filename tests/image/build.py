"""Builds the image: on the base that the Containerfile names, or on one made from Debian packages where none can be pulled.

What this machine's pip needs (an index, a CA) reaches the build as secrets; both hold `CANARY`, so that a layer that
kept any of it can be told.
"""

import ast
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from pip._internal.models.index import PyPI

from tests.image.podman import BUILD_FLAGS, need, podman, run, tell

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "localhost/armcore-trio-test"
CANARY = "canary-e6b0d1c2a7"

_PULL_SECONDS, _BOOTSTRAP_SECONDS, _BUILD_SECONDS = 180, 600, 600
_PACKAGES = "ca-certificates,python3,python3-venv"
_UNUSED = ("var/cache/apt", "var/lib/apt/lists", "var/log", "usr/share/doc", "usr/share/locale", "usr/share/man")
_PIP_OPTIONS = ("index-url", "extra-index-url", "trusted-host", "default-timeout", "timeout", "retries")


def base_image() -> str:
    """The name of an image that is here: `BASE_IMAGE`, else the Containerfile's, else one of our own."""
    (default,) = re.findall(r"^ARG BASE_IMAGE=(\S+)", (ROOT / "Containerfile").read_text(), re.MULTILINE)
    wanted = os.environ.get("BASE_IMAGE") or default
    if _is_here(wanted) or _can_be_pulled(wanted):
        return wanted
    ours = f"localhost/armcore-trio-test-base:{_release()}"
    if not _is_here(ours):
        tell(f"{wanted} cannot be pulled; making a base from Debian packages ({_PACKAGES})")
        _bootstrap(ours)
    return ours


def build(base: str) -> str:
    """`make image` on this base; the image's name."""
    podman("image", "rm", "--force", IMAGE, check=False)
    with tempfile.TemporaryDirectory() as directory:
        options = [*BUILD_FLAGS, f"--build-arg=BASE_IMAGE={base}", *_secrets(Path(directory))]
        environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS")}
        run("make", "image", f"IMAGE={IMAGE}", f"ARGS={' '.join(options)}", cwd=ROOT, env=environment, seconds=_BUILD_SECONDS)
    return IMAGE


def package_hosts() -> set[str]:
    """Names that only this machine's pip configuration knows; pip's own index is named in many a package's metadata."""
    urls = " ".join(_pip_configuration().get(option, "") for option in _PIP_OPTIONS)
    return set(re.findall(r"//(?:[^@/\s]*@)?([^/:\s]+)", urls)) - {PyPI.netloc}


def _is_here(image: str) -> bool:
    return podman("image", "exists", image, check=False).returncode == 0


def _can_be_pulled(image: str) -> bool:
    try:
        return podman("pull", "--quiet", image, check=False, seconds=_PULL_SECONDS).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _release() -> str:
    (codename,) = re.findall(r"^VERSION_CODENAME=(\S+)", Path("/etc/os-release").read_text(), re.MULTILINE)
    return str(codename)


def _bootstrap(image: str) -> None:
    """This machine's own Debian release, from where its apt gets packages."""
    need({"debootstrap": "debootstrap"})
    targets = run("apt-get", "indextargets", "--format=$(RELEASE) $(REPO_URI)", "Identifier: Packages").stdout.splitlines()
    mirrors = [uri for release, _, uri in (line.partition(" ") for line in targets) if release == _release()]
    with tempfile.TemporaryDirectory(dir="/var/tmp") as root:  # /tmp may be mounted nodev or noexec
        run(
            "debootstrap",
            "--variant=minbase",
            f"--include={_PACKAGES}",
            _release(),
            root,
            *mirrors[:1],
            seconds=_BOOTSTRAP_SECONDS,
        )
        for directory in _UNUSED:
            run("find", f"{root}/{directory}", "-type", "f", "-delete", check=False)
        archive = Path(root, "image.tar")
        run("tar", "--create", f"--directory={root}", f"--file={archive}", "--exclude=./image.tar", ".")
        podman("import", "--quiet", str(archive), image)


def _secrets(directory: Path) -> list[str]:
    pip = _pip_configuration()
    lines = ["[global]", f"# {CANARY}", *(f"{option} = {pip[option]}" for option in _PIP_OPTIONS if option in pip)]
    flags = []
    if certificates := pip.get("cert") or os.environ.get("SSL_CERT_FILE"):
        lines.append("cert = /run/secrets/ca.pem")
        (directory / "ca.pem").write_text(f"{Path(certificates).read_text()}\n# {CANARY}\n")
        flags = [f"--secret=id=ca.pem,src={directory}/ca.pem"]
    (directory / "pip.conf").write_text("\n".join(lines) + "\n")
    return [*flags, f"--secret=id=pip.conf,src={directory}/pip.conf"]


def _pip_configuration() -> dict[str, str]:
    """Options in force; what lies in directories of this machine is left out, since the build does not see them."""
    listing = run(sys.executable, "-m", "pip", "config", "list").stdout
    found = re.findall(r"^(?:global|install|:env:)\.([a-z-]+)=(.*)$", listing, re.MULTILINE)
    values = {option: " ".join(str(ast.literal_eval(value)).split()) for option, value in found}
    remote = {
        option: " ".join(word for word in value.split() if not word.startswith("file:")) for option, value in values.items()
    }
    return {option: value for option, value in remote.items() if value}
