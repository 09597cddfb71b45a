"""docs/explorer.html in Chromium: no errors, what a person types and clicks, every width."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

import mixprec

PAGE = Path(__file__).resolve().parents[2] / "docs" / "explorer.html"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
if not CHROMIUM or not DRIVER:
    pytest.skip("there is no chromium with its chromedriver", allow_module_level=True)


@pytest.fixture
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "window-size=1200,1000"):
        options.add_argument(f"--{flag}")
    found = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    found.get(PAGE.as_uri())
    yield found
    assert found.get_log("browser") == []
    found.quit()


def text(browser: Any, name: str) -> str:
    return str(browser.find_element(By.ID, name).text)


def read(browser: Any, note: str) -> None:
    """Wait until a file is."""
    WebDriverWait(browser, 20).until(lambda _: note in text(browser, "file-note"))


def type_into(browser: Any, name: str, words: str) -> None:
    field = browser.find_element(By.ID, name)
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys(words)


def test_a_number_its_neighbours_and_what_is_no_number(browser: Any) -> None:
    type_into(browser, "number", "0.3")
    rows = text(browser, "casts").splitlines()
    assert "E4M3 0 0101 010 0.3125 4.2 % 0.28125 0.34375 [0.296875, 0.328125]" in rows
    assert "E2M1 0 00 1 0.5 67 % 0 1 (0.25, 0.75)" in rows
    assert "MXFP4, E2M1 32 2^-1 (code 126) 0.5 0 00 1 0.25 17 %" in text(browser, "blocks")
    browser.find_element(By.ID, "up").send_keys(Keys.ENTER)
    assert browser.find_element(By.ID, "number").get_property("value") == "0.34375"
    type_into(browser, "number", "nan")
    assert "E5M2 0 11111 11 NaN" in text(browser, "casts")
    type_into(browser, "number", "a lot")
    assert text(browser, "number-error").startswith("Number must be a number such as 0.1")
    assert not browser.find_element(By.ID, "draw1").is_enabled()


def test_draws_of_stochastic_rounding(browser: Any) -> None:
    type_into(browser, "number", "0.29")
    for _ in range(5):
        browser.find_element(By.ID, "draw1000").click()
    found = re.match(
        r"5,000 draws: ([\d,]+) away from zero, mean ([\d.]+);", text(browser, "drawn")
    )
    assert found
    assert abs(int(found[1].replace(",", "")) / 5000 - 0.28) < 0.03
    assert abs(float(found[2]) - 0.29) < 1e-3


def test_a_loss_scale_and_a_histogram_of_ones_own(browser: Any, tmp_path: Path) -> None:
    before = text(browser, "fates")
    browser.find_element(By.ID, "scale").send_keys(*[Keys.ARROW_RIGHT] * 20)
    assert text(browser, "scale-shown") == "2^20"
    assert float(re.findall(r"([\d.]+) % become 0", before)[0]) > 30
    assert float(re.findall(r"([\d.]+) % become 0", text(browser, "fates"))[0]) == 0
    mixprec.stats.histogram(torch.tensor([0.0, 1.0, 1.0, 2.0**-45])).save(tmp_path / "own.json")
    browser.find_element(By.ID, "file").send_keys(str(tmp_path / "own.json"))
    read(browser, "own.json: 4 numbers; not shown: zeros 1.")
    assert "33.3 % become Inf" not in text(browser, "fates")
    assert "66.7 % become Inf" in text(browser, "fates")
    saved = json.loads((tmp_path / "own.json").read_text())
    for wrong in (
        [], None, {**saved, "counts": None}, {**saved, "counts": {"2032": -1}},
        {**saved, "counts": {"5000": 1}}, {**saved, "numel": None}, {**saved, "version": 2},
    ):  # fmt: skip
        (tmp_path / "other.json").write_text(json.dumps(wrong))
        browser.find_element(By.ID, "file").send_keys(str(tmp_path / "other.json"))
        read(browser, "other.json is not read")
        assert "66.7 % become Inf" not in text(browser, "fates"), wrong
        browser.find_element(By.ID, "file").send_keys(str(tmp_path / "own.json"))
        read(browser, "own.json")


def test_a_dot_product_of_ones_own(browser: Any) -> None:
    type_into(browser, "dot-a", "128 0.25 0.25")
    type_into(browser, "dot-b", "64 0.25 0.25")
    sums = text(browser, "dot-sums").splitlines()
    assert sums[0].startswith("in FP64 8192.125")
    assert sums[2] == "tensor cores of Hopper 8192 0.0015 %"
    assert sums[3] == "tensor cores of Blackwell 8192.125 0"
    steps = {}
    for name in ("Hopper", "Blackwell", "FP32"):
        Select(browser.find_element(By.ID, "dot-steps-of")).select_by_visible_text(name)
        steps[name] = text(browser, "dot-steps").splitlines()
    assert steps == {
        "Hopper": ["1 to 3 8192 2^0 8192, 0 0, 0.0625 8192"],
        "Blackwell": ["1 to 3 8192 2^-12 8192, 0.0625 0 8192.125"],
        "FP32": [
            "1 8192 2^-10 8192 0 8192",
            "2 8192 2^-10 0.0625 0 8192.0625",
            "3 8192.0625 2^-10 0.0625 0 8192.125",
        ],
    }
    Select(browser.find_element(By.ID, "dot-format")).select_by_visible_text("BF16")
    type_into(browser, "dot-a", "2^66 1")
    type_into(browser, "dot-b", "1 1")
    lost = text(browser, "dot-steps").splitlines()[1]
    assert lost == "2 7.37869763e19 2^43 0 1 7.37869763e19"
    type_into(browser, "dot-b", "1")
    assert text(browser, "dot-sums") == "a has 2 numbers and b 1: they must be as many"


@pytest.mark.parametrize("width", [360, 800, 1600])
def test_no_width_scrolls_sideways(browser: Any, width: int, tmp_path: Path) -> None:
    # A window has a least width of its own; a device that is emulated has not.
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    shown = browser.find_elements(By.CSS_SELECTOR, "#ruler svg, #histogram svg, #dot-steps tr")
    assert len(shown) > 3


def test_every_control_has_a_name_and_is_reached_by_tab(browser: Any) -> None:
    controls = browser.find_elements(By.CSS_SELECTOR, "input, select, button")
    assert all(control.accessible_name for control in controls)
    reached = set()
    for _ in controls:
        ActionChains(browser).send_keys(Keys.TAB).perform()
        reached.add(browser.switch_to.active_element.get_attribute("id"))
    assert reached == {control.get_attribute("id") for control in controls}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_contrast(browser: Any, theme: str) -> None:
    """WCAG AA: 4.5 to 1 for text."""
    emulated = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", emulated)
    colors = browser.execute_script(
        "const style = getComputedStyle(document.documentElement);"
        "return Object.fromEntries(['ink', 'soft', 'sign', 'exponent', 'mantissa', 'paper']"
        ".map((name) => [name, style.getPropertyValue('--' + name).trim()]));"
    )

    def luminance(color: str) -> float:
        digits = color[1:] if len(color) == 7 else "".join(2 * digit for digit in color[1:])
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(weight * p for weight, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    paper = luminance(colors.pop("paper"))
    for name, color in colors.items():
        low, high = sorted((luminance(color), paper))
        assert (high + 0.05) / (low + 0.05) >= 4.5, name
