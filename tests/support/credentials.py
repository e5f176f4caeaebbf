"""Nkey seeds and signed tokens, as `nsc` makes them for an operator, its accounts and their users; certificates' files."""

import json
import os
import time
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp

import nkeys
import trustme


def new_seed(prefix: int = nkeys.PREFIX_BYTE_USER) -> str:
    """A seed of this kind."""
    return bytes(nkeys.encode_seed(os.urandom(32), prefix)).decode()


def public_key(seed: str) -> str:
    """What everybody may know of it."""
    return bytes(nkeys.from_seed(bytearray(seed.encode())).public_key).decode()


def signed_jwt(issuer: str, of: str, kind: str, *, nats: Mapping[str, object] | None = None, exp: int | None = None) -> str:
    """A token of the kind `operator`, `account` or `user` for the seed `of`, good until `exp`; `nats` is added to its part."""
    limits = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1)
    usual: dict[str, Mapping[str, object]] = {"account": {"limits": {**limits, "wildcards": True}}, "user": limits}
    body = {
        "jti": "x",
        "iat": int(time.time()),
        "iss": public_key(issuer),
        "name": kind,
        "sub": public_key(of),
        "nats": {"type": kind, "version": 2, **usual.get(kind, {}), **(nats or {})},
        **({} if exp is None else {"exp": exp}),
    }
    text = ".".join(_encoded(json.dumps(part).encode()) for part in ({"typ": "JWT", "alg": "ed25519-nkey"}, body))
    return f"{text}.{_encoded(nkeys.from_seed(bytearray(issuer.encode())).sign(text.encode()))}"


def user_credentials() -> tuple[str, str]:
    """A seed and a JWT that belong together, issued by an account no server knows."""
    seed = new_seed()
    return seed, signed_jwt(new_seed(nkeys.PREFIX_BYTE_ACCOUNT), seed, "user")


class Operator:
    """An operator with one account, and the nats.conf of a server that trusts it, with the memory resolver."""

    def __init__(self) -> None:
        self._seed = new_seed(nkeys.PREFIX_BYTE_OPERATOR)
        self._account = new_seed(nkeys.PREFIX_BYTE_ACCOUNT)
        self._jwt = signed_jwt(self._seed, self._seed, "operator")  # once: a reload must find the same

    def user(self, seed: str, *, exp: int | None = None) -> str:
        """A JWT for a user of the account, good until `exp`, in seconds of the epoch."""
        return signed_jwt(self._account, seed, "user", exp=exp)

    def config(self, *, accounts: bool = True, revoked: str | None = None) -> str:
        """Without `accounts` the server does not know the account; `revoked` is the seed of a user whose JWTs no longer hold."""
        more = {"revocations": {public_key(revoked): int(time.time()) + 1}} if revoked else {}
        token = signed_jwt(self._seed, self._account, "account", nats=more)
        preload = f"{public_key(self._account)}: {token}" if accounts else ""
        return f"operator: {self._jwt}\nresolver: MEMORY\nresolver_preload: {{ {preload} }}"


def tls_config(certificate: trustme.LeafCert, directory: Path) -> str:
    """The lines of nats.conf for a server with this certificate, which is written into a new subdirectory."""
    files = Path(mkdtemp(dir=directory))
    certificate.private_key_pem.write_to_path(str(files / "key.pem"))
    certificate.cert_chain_pems[0].write_to_path(str(files / "cert.pem"))
    return f'tls {{ cert_file: "{files / "cert.pem"}", key_file: "{files / "key.pem"}" }}'


def _encoded(part: bytes) -> str:
    return urlsafe_b64encode(part).rstrip(b"=").decode()
