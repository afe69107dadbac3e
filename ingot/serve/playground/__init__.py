"""The page on which a served model is tried: plain files that `ingot serve` shows at `/` and that
`ingot ui` shows as a tab.
"""

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse, Response

FOLDER = Path(__file__).parent
FILES = ("base.css", "playground.css", "dom.js", "playground.js", "tasks.js", "served.js")
ROUTES = ("/", *(f"/playground/{name}" for name in FILES))
"""What a browser asks for before anybody can type an API key."""
HEADERS = {
    # Other served models may be asked too, where they allow it.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src *;"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def router() -> APIRouter:
    """`GET /` and the files that it needs."""
    routes = APIRouter()

    def answers(path: str, name: str) -> None:
        @routes.get(path, include_in_schema=False)
        async def file() -> Response:
            return FileResponse(FOLDER / name, headers=HEADERS)

    for path, name in zip(ROUTES, ("index.html", *FILES), strict=True):
        answers(path, name)
    return routes
