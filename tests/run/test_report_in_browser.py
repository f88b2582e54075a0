"""The page of a run in a real browser: `apt-get install chromium`, then `make oracle`."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from report_runs import write_long, write_run

from forgekit.run.reporting.write import write_report


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "a run")


LOOKS = {"light": [], "dark": ["--blink-settings=preferredColorScheme=0"]}
PROBE = """<script>addEventListener("load", () => {
  const plot = document.querySelector("#loss .plot"), box = plot.getBoundingClientRect();
  const at = { clientX: box.left + box.width / 2, clientY: box.top + 9 };
  plot.dispatchEvent(new PointerEvent("pointermove", at));
  parent.postMessage(JSON.stringify({
    said: plot.querySelector("output").textContent, width: document.documentElement.scrollWidth,
    over: [...document.querySelectorAll("figure.chart")].filter((figure) => {
      const bottoms = [...figure.querySelectorAll("figcaption *")]
        .map((e) => e.getBoundingClientRect().bottom);
      return figure.querySelector(".plot svg")?.getBoundingClientRect().top
        < Math.max(...bottoms) + 6;
    }).length,
    cut: [...document.querySelectorAll(".tick.y")]
      .filter((tick) => tick.getBoundingClientRect().left < 0).length,
    text: Math.min(...[...document.querySelectorAll("body *")].filter((e) => e.textContent.trim())
      .map((e) => parseFloat(getComputedStyle(e).fontSize))),
    asked: performance.getEntriesByType("resource")
      .filter((e) => !e.name.startsWith("data:")).length,
  }), "*");
});</script>"""
FRAME = """<title></title><script>
  addEventListener("message", (event) => (document.title = event.data));
</script><iframe src="{page}" style="width: {width}px; height: 900px"></iframe>"""
"""A window is 500 pixels wide or more; a frame has the width of a telephone."""


def browse(tmp_path, page, *options):
    """Run Chromium without a network; return what it printed."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    assert chromium, "no chromium on this machine: apt-get install chromium"
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += ["--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND", *options]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=3000"]
    ended = subprocess.run([*command, page.as_uri()], capture_output=True, timeout=200, check=True)
    return ended.stdout.decode()


@pytest.mark.oracle
@pytest.mark.parametrize("width", [1280, 500])
@pytest.mark.parametrize("look", LOOKS)
def test_the_page_is_readable(look, width, run, tmp_path):
    from matplotlib.image import imread

    page = write_report([run], pictures=False).page
    picture = tmp_path / "page.png"
    browse(tmp_path, page, f"--screenshot={picture}", f"--window-size={width},3000", *LOOKS[look])
    pixels = imread(picture)[..., :3]
    assert pixels.shape == (3000, width, 3)
    back = pixels[0, 0].mean()
    assert back > 0.95 if look == "light" else back < 0.15
    inked = np.abs(pixels - pixels[0, 0]).max(axis=2) > 0.3
    assert 0.01 < inked.mean() < 0.5
    assert np.abs(pixels.max(axis=2) - pixels.min(axis=2)).max() > 0.4  # lines have colours


@pytest.mark.oracle
@pytest.mark.parametrize("width", [1280, 390])
def test_a_pointer_reads_the_numbers_and_nothing_is_cut_off(width, run, tmp_path):
    page = write_report([run], pictures=False).page
    title = measured(tmp_path, page, width)
    step, *values = title["said"].split("  ·  ")
    assert step in ("step 20", "step 21")
    row = int(step.removeprefix("step "))
    name, _, value = values[0].rpartition(" ")
    assert name == "each row"
    assert float(value) == pytest.approx(2 + 5 / row, rel=2e-3)
    assert_is_whole(title, width)


@pytest.mark.oracle
@pytest.mark.parametrize("width", [1280, 390])
def test_four_runs_with_long_names_stay_legible(width, tmp_path):
    folders = [tmp_path / f"llama-1b-bs512-{name}-cosine-seed0" for name in ("a", "b", "c", "d")]
    for folder in folders:
        write_run(folder)
    page = write_report(folders, tmp_path / "all.html", pictures=False).page
    assert_is_whole(measured(tmp_path, page, width), width)


def measured(tmp_path, page, width):
    """What the probe found in a page of that width."""
    page.write_text(page.read_text().replace("</body>", f"{PROBE}</body>"))
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.format(page=page.as_uri(), width=width))
    found = browse(tmp_path, frame, "--dump-dom", "--window-size=1400,1000")
    return json.loads(html.unescape(re.search("<title>(.*?)</title>", found)[1]))


def assert_is_whole(found, width):
    assert found["width"] <= width
    assert (found["cut"], found["over"], found["asked"]) == (0, 0, 0)
    assert found["text"] >= 11


@pytest.mark.oracle
def test_a_page_of_a_hundred_thousand_steps_opens(tmp_path):
    write_long(tmp_path / "run" / "metrics.jsonl")
    page = write_report([tmp_path / "run"], pictures=False).page
    found = browse(tmp_path, page, "--dump-dom")
    assert found.count("<figure") == page.read_text().count("<figure") > 8
