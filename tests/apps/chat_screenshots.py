"""Takes the pictures of the chat that docs/serving.md shows: a text answer, one about a picture, and the side panel.

    python tests/apps/chat_screenshots.py [--model data/k3-nano] [--ranks 2] [--folder docs/images]

The answers are the model's own, from real ranks, in headless Chromium.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from test_chat_browser import CHROMIUM, FLAGS, Visitor  # noqa: E402

from apps.chat import build_app, examples_for, launch, running_service  # noqa: E402
from apps.panel import Panel  # noqa: E402
from workbench.placement import choose_layout  # noqa: E402
from workbench.spec import read_spec  # noqa: E402

SIZE = {"width": 1000, "height": 760}
PANEL_SIZE = {"width": 1000, "height": 1120}  # the figures, and the map of the experts below them
NUM_COLOURS = 128  # plenty for a page, and a third of the bytes
ANSWER_S = 240


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("data/k3-nano"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=ROOT / "docs" / "images")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    layout = choose_layout(read_spec(args.model), args.ranks)
    scene = ROOT / "data" / "scenes" / "colour.png"
    with (
        running_service(args.model, layout, device="cpu") as (service, facts),
        tempfile.TemporaryDirectory() as profile,
        sync_playwright() as playwright,
    ):
        app = build_app(service, facts=facts, examples=examples_for(args.model), panel=Panel.of(service))
        url = launch(app, wait=False)
        context = playwright.chromium.launch_persistent_context(
            profile, executable_path=CHROMIUM, headless=True, args=FLAGS, viewport=SIZE
        )
        visitor = Visitor(context, url)

        def shoot(name: str) -> None:
            visitor.page.wait_for_timeout(500)
            path = args.folder / f"chat-{name}.png"
            visitor.page.screenshot(path=path)
            with Image.open(path) as taken:
                taken.convert("RGB").quantize(NUM_COLOURS).save(path, optimize=True)
            print(f"{path}: {path.stat().st_size:,} B; {visitor.note}")

        visitor.ask("What is tensor parallelism?")
        visitor.wait(lambda: "written" in visitor.note, "text answer", ANSWER_S)
        shoot("text")
        visitor.page.locator("#clear").click()
        visitor.wait(lambda: not visitor.answers, "an empty conversation")
        visitor.ask("Which colour is the square?", scene)
        visitor.wait(lambda: "written" in visitor.note, "answer about the picture", ANSWER_S)
        shoot("picture")
        visitor.page.set_viewport_size(PANEL_SIZE)
        visitor.page.locator("#side .toggle-button").click()
        visitor.page.locator("#wants-experts input").check()
        visitor.wait(lambda: "first token" in visitor.page.locator("#panel").inner_text(), "side panel")
        visitor.ask("Which shapes are there?")
        visitor.wait(lambda: visitor.page.locator("#experts svg").count() == 1, "load of experts", ANSWER_S)
        visitor.wait(lambda: "written" in visitor.note, "another answer", ANSWER_S)
        visitor.page.wait_for_timeout(2500)  # one more round of figures
        shoot("panel")
        assert visitor.external == [], visitor.external
        context.close()
        app.close()


if __name__ == "__main__":
    main()
