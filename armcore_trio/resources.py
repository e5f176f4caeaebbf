"""Where the files that are not Python lie: inside an installed package, or beside it in a checkout."""

from pathlib import Path

_PACKAGE = Path(__file__).parent
_ROOT = _PACKAGE if (_PACKAGE / "schemas").is_dir() else _PACKAGE.parent

SCHEMAS = _ROOT / "schemas"
MIGRATIONS = _ROOT / "migrations"
SQL = _PACKAGE / "borders" / "sql"
