"""Usage rows in SQLite files, one a day: written once per hold, read by export."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Any

_TABLE = """
CREATE TABLE IF NOT EXISTS usage (
    hold TEXT PRIMARY KEY, at TEXT NOT NULL, request TEXT NOT NULL, tenant TEXT NOT NULL, key TEXT NOT NULL,
    model TEXT NOT NULL, class TEXT NOT NULL, outcome TEXT NOT NULL, input_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL, price_nano INTEGER NOT NULL,
    timings TEXT NOT NULL
) WITHOUT ROWID
"""
COLUMNS = (
    "hold", "at", "request", "tenant", "key", "model", "class", "outcome",
    "input_tokens", "cached_tokens", "output_tokens", "price_nano", "timings",
)  # fmt: skip
# A hold that lapsed may have been settled after all: what was used then takes the place of nothing.
_INSERT = f"""
INSERT INTO usage ({", ".join(COLUMNS)}) VALUES ({", ".join("?" * len(COLUMNS))})
ON CONFLICT (hold) DO UPDATE SET {", ".join(f"{name} = excluded.{name}" for name in COLUMNS[1:])}
WHERE usage.outcome = 'lapsed' AND excluded.outcome != 'lapsed'
"""


@dataclass(frozen=True)
class LedgerRow:
    """One request. `at_us` is Redis time at its end, microseconds since 1970; `fields` as the gateway wrote
    them."""

    hold: str
    at_us: int
    fields: dict[str, Any]

    @property
    def day(self) -> date:
        """In UTC."""
        return datetime.fromtimestamp(self.at_us / 1e6, timezone.utc).date()


class LedgerFiles:
    """`usage-YYYY-MM-DD.sqlite` in one folder, by the UTC day a request ended on. Methods block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, rows: Iterable[LedgerRow]) -> None:
        """Add rows; one with a hold that is there already changes nothing. They are on disk on return.

        Raises OSError, sqlite3.Error.
        """
        by_day: dict[date, list[tuple[Any, ...]]] = {}
        for row in rows:
            by_day.setdefault(row.day, []).append(_values(row))
        if by_day:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for day, values in by_day.items():
            with closing(sqlite3.connect(self._path(day), timeout=10)) as database, database:
                database.execute("PRAGMA synchronous = FULL")
                database.execute(_TABLE)
                database.executemany(_INSERT, values)

    def read(
        self, since: date | None = None, until: date | None = None, tenant: str | None = None
    ) -> Iterator[dict[str, Any]]:
        """Rows from `since` to `until`, both included, in the order of their ends. Raises sqlite3.Error."""
        for path in sorted(self._folder.glob("usage-????-??-??.sqlite")):
            day = date.fromisoformat(path.stem.removeprefix("usage-"))
            if (since is not None and day < since) or (until is not None and day > until):
                continue
            query = f"SELECT {', '.join(COLUMNS)} FROM usage"
            query += "" if tenant is None else " WHERE tenant = ?"
            with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
                parameters = () if tenant is None else (tenant,)
                for values in database.execute(query + " ORDER BY at, hold", parameters):
                    yield dict(zip(COLUMNS, values, strict=True))

    def _path(self, day: date) -> Path:
        return self._folder / f"usage-{day.isoformat()}.sqlite"


def _values(row: LedgerRow) -> tuple[Any, ...]:
    at = datetime.fromtimestamp(row.at_us / 1e6, timezone.utc).isoformat(timespec="microseconds")
    timings = json.dumps(row.fields["timings"], separators=(",", ":"))
    return (row.hold, at, *(row.fields[name] for name in COLUMNS[2:-1]), timings)
