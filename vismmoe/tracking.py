"""Where MLflow keeps runs and models: the default database, what is refused, and silence.

MLflow takes seconds to import and talks a lot; it is imported inside functions only, and every use of it happens
within `talking_to`, which turns its failures into sentences.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from vismmoe.errors import UsageError, VisMMoEError

VARIABLE = "MLFLOW_TRACKING_URI"
LOCKED_S = 20.0  # how long another program's lock is waited for
DATABASES = ("sqlite", "postgresql", "mysql", "mssql")


def tracking_uri(given: str | None = None) -> str:
    """`given`, else MLFLOW_TRACKING_URI, else a SQLite file in the working folder. SQLite paths are made absolute.

    Raises UsageError for stores that cannot hold registered models: plain folders, and file: addresses.
    """
    uri = given or os.environ.get(VARIABLE) or "sqlite:///mlflow.db"
    scheme = uri.split(":", 1)[0].split("+", 1)[0] if "://" in uri else "file"
    if scheme == "sqlite":
        return f"sqlite:///{database_file(uri)}"
    if scheme in (*DATABASES, "http", "https"):
        return uri
    raise UsageError(
        f"MLflow at {uri!r} cannot hold registered models: current releases have no registry on plain files. "
        "Use a database, such as --tracking-uri sqlite:///mlflow.db, or the address of an MLflow server."
    )


def database_file(uri: str) -> Path:
    """The file behind a sqlite:/// address, absolute."""
    return Path(unquote(urlparse(uri).path)[1:] or "mlflow.db").absolute()


def artifact_root(uri: str) -> str | None:
    """Where a new experiment keeps its files: beside a SQLite database, wherever commands run; else MLflow decides."""
    if not uri.startswith("sqlite"):
        return None
    return (database_file(uri).parent / "mlflow-artifacts").as_uri()


@contextmanager
def talking_to(uri: str) -> Iterator[Any]:
    """An MlflowClient on `uri`; its chatter is silenced, its failures become UsageError."""
    _settings()
    if uri.startswith("sqlite"):
        _check_database(database_file(uri))
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # alembic sets its own level whenever it opens a database
    try:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        try:
            yield MlflowClient(uri, uri)
        except MlflowException as error:
            raise UsageError(f"MLflow at {uri} refuses: {_first_line(error)}") from None
        except VisMMoEError:
            raise
        except ModuleNotFoundError as error:  # the driver of a database server
            raise UsageError(f"MLflow at {uri} needs the package {error.name}, which is not installed.") from None
        except Exception as error:
            if type(error).__module__.split(".")[0] not in ("sqlalchemy", "sqlite3", "alembic", "requests", "urllib3"):
                raise
            raise UsageError(f"MLflow at {uri} cannot be used: {_first_line(error)}") from None
    finally:
        logging.disable(before)


def _check_database(file: Path) -> None:
    """UsageError for what is no database, or one that is locked: MLflow would try again for many minutes."""
    try:
        if file.exists() and not file.is_file():
            raise UsageError(f"The MLflow database {file} is no regular file: name another one with --tracking-uri.")
        if not file.parent.is_dir():
            raise UsageError(f"There is no folder {file.parent} for the MLflow database {file.name}: make it first.")
        if not file.exists():
            return
        with closing(sqlite3.connect(file, timeout=LOCKED_S)) as database:
            database.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except (sqlite3.Error, OSError, ValueError) as error:
        raise UsageError(f"The MLflow database {file!s:.300} cannot be used: {error}.") from None


@contextmanager
def environment_kept() -> Iterator[None]:
    """MLflow's own loggers point the whole process to their server; afterwards it is asked as before."""
    before = os.environ.get(VARIABLE)
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before


def _settings() -> None:
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # its default keeps a user waiting for minutes
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") + "." if lines else type(error).__name__ + "."
