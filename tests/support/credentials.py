"""A user's nkey seed and JWT as an operator would hand them out, signed by nobody."""

import json
import os
from base64 import urlsafe_b64encode

import nkeys


def user_credentials() -> tuple[str, str]:
    """A seed and a JWT that belong together."""
    seed = bytes(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER))
    public = bytes(nkeys.from_seed(bytearray(seed)).public_key).decode()
    parts = [{"typ": "JWT", "alg": "ed25519-nkey"}, {"sub": public, "nats": {"type": "user"}}]
    encoded = [urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in parts]
    return seed.decode(), ".".join([*encoded, "c2lnbmF0dXJl"])
