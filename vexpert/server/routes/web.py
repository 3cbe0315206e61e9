"""GET / and its files: a page that asks, compares, loads adapters and shows figures."""

from importlib.resources import files

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import Response

KINDS = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
# The page runs its own scripts and asks its own server; nothing else, whatever an answer holds.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # a new version of the server has new files under the same names
}


def _read_files() -> tuple[bytes, dict[str, tuple[bytes, str]]]:
    """The page, and content and media type of each other file by name."""
    folder = files("vexpert.server") / "web"
    others = {
        item.name: (item.read_bytes(), kind)
        for item in folder.iterdir()
        for suffix, kind in KINDS.items()
        if item.name.endswith(suffix)
    }
    return (folder / "index.html").read_bytes(), others


PAGE, FILES = _read_files()
# Open to all where there are keys: they hold no secret, and people enter their key there.
PATHS = ("/", *(f"/web/{name}" for name in FILES))

router = APIRouter(include_in_schema=False)


@router.get("/")
async def page() -> Response:
    """The page."""
    return Response(PAGE, headers=HEADERS, media_type="text/html")


@router.get("/web/{name}")
async def file(name: str) -> Response:
    """One of its scripts, its style or its icon."""
    if name not in FILES:
        raise HTTPException(404, "no such file")
    content, kind = FILES[name]
    return Response(content, headers=HEADERS, media_type=kind)
