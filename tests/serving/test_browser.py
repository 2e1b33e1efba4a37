"""The page in a real browser: an answer streams, drafted tokens stand out, the last round's tree opens."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

pytestmark = [pytest.mark.any_jax, pytest.mark.slow]


@pytest.fixture
def browser() -> Iterator[webdriver.Chrome]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no Chromium")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(driver)) as found:
        found.set_page_load_timeout(60)
        yield found


def test_an_answer_streams_and_shows_what_was_drafted(browser, served):
    browser.get(f"{served.url}/")
    wait = WebDriverWait(browser, 60)
    wait.until(lambda _: browser.find_element(By.ID, "model").text == "org/tiny")
    for field, text in (("prompt", "apple bird <b>cloud</b>"), ("max", "40")):
        element = browser.find_element(By.ID, field)
        element.clear()
        element.send_keys(text)
    browser.find_element(By.ID, "ask").click()
    wait.until(lambda _: browser.execute_script("return document.body.dataset.state") == "done")
    messages = [{"role": "user", "content": "apple bird <b>cloud</b>"}]
    output = served.client.chat.completions.create(model="org/tiny", messages=messages, temperature=0, max_tokens=40)
    text = browser.find_element(By.CSS_SELECTOR, "#answers .text")
    assert text.get_property("textContent") == output.choices[0].message.content
    drafted = text.find_elements(By.CSS_SELECTOR, "span[data-depth]")
    assert drafted and {span.get_attribute("data-depth") for span in drafted} <= {"1", "2", "3"}
    share = round(100 * len(drafted) / output.usage.completion_tokens)
    assert f"{share} % drafted" in browser.find_element(By.CSS_SELECTOR, "#answers .numbers").text
    browser.find_element(By.CSS_SELECTOR, "#answers summary").click()
    wait.until(lambda _: browser.find_elements(By.CSS_SELECTOR, "#answers svg rect"))
    assert len(browser.find_elements(By.CSS_SELECTOR, "#answers svg rect")) == 4  # the root and a chain of 3
    browser.find_element(By.ID, "compare").click()
    error = browser.find_element(By.ID, "error")
    wait.until(lambda _: error.is_displayed())
    assert "drafts: got False" in error.text  # this engine has no choice
    wait.until(lambda _: browser.find_element(By.ID, "ask").is_enabled())
    assert [x for x in browser.get_log("browser") if "400" not in x["message"]] == []
