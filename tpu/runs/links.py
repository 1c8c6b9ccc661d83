"""Where a person looks at the files of a run: addresses that a browser opens. Pure."""

from __future__ import annotations

from urllib.parse import quote

CONSOLE = "https://console.cloud.google.com/storage/browser"


def browser_url(folder: str, local: str | None) -> str:
    """The address at which a browser shows a gs:// folder: Google's console, or the listing of a `local` server."""
    bucket, _, path = folder.removeprefix("gs://").partition("/")
    if local is None:
        return f"{CONSOLE}/{bucket}/{quote(path)}"
    return f"{local.rstrip('/')}/storage/v1/b/{bucket}/o?prefix={quote(f'{path}/', safe='')}"


def file_links(run_dir: str, local: str | None) -> dict[str, str]:
    """Addresses of a run's folders, by what is in them."""
    return {
        name: browser_url(f"{run_dir}/{name}", local) for name in ("checkpoints", "metrics", "logs", "report")
    }
