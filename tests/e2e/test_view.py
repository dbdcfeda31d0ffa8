"""The page of ``rl-async view`` in Chromium: it moves while a run trains and explains tokens, and what a model said is
never run."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rl_async.messages import Turn
from tests.conftest import make_rows
from tests.e2e.browser import SIZES, Tab
from tests.support.recordings import HOSTILE, conversation, make_run, write_evaluation, write_step

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]
LONG = 1 << 20  # characters of one line
LONG_TOKENS = 50_000
MORE = ", since " + "one thing leads to another " * 20  # beyond what a preview has


def byte_tokenizer(folder: Path) -> Tokenizer:
    """A tokenizer with one token per byte, in ``folder``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs ``first`` and ``other``. Of ``first``, step 1 has a hostile row, step 2 masked tokens, and
    step 3 a row of one long line."""
    folder = tmp_path_factory.mktemp("runs")
    tokenizer = byte_tokenizer(folder / "model")
    first = make_run(folder / "first")
    with (first / "config.yaml").open("a") as config:
        config.write(f"model:\n  path: {folder / 'model'}\n")
    (hostile,) = make_rows(9, groups=1, samples=1)
    hostile.token_ids = np.array(tokenizer.encode(HOSTILE).ids, np.int32)
    hostile.loss_mask = np.ones(len(hostile.token_ids), bool)
    hostile.logprobs = np.full(len(hostile.token_ids), -0.5, np.float32)
    hostile.turns = conversation("tokens of the worst kind 天気がいい", HOSTILE)
    hostile.turns[1].start, hostile.turns[1].end = 0, len(hostile.token_ids)
    (long,) = make_rows(10, groups=1, samples=1)
    long.token_ids = np.full(LONG_TOKENS, tokenizer.token_to_id("x"), np.int32)
    long.loss_mask, long.logprobs = np.arange(LONG_TOKENS) >= 4, np.full(LONG_TOKENS, -0.5, np.float32)
    long.turns = conversation("endless", "x" * LONG)
    long.turns[1].end, call = LONG_TOKENS, long.turns[1].tool_calls[0]
    call.result, call.cut = "y" * LONG, 4_000_000
    (instructed,) = make_rows(11, groups=1, samples=1)
    instructed.token_ids[:4] = tokenizer.encode("S\nU\n").ids
    instructed.turns = conversation("what is asked", "done")
    instructed.turns.insert(0, Turn(role="system", text="what is demanded", start=0, end=4))
    write_step(first, 3, [hostile, long, instructed])
    write_evaluation(first, 0, [[1.0], [0.0]], ["math", "math"], f"{MORE} in version 0")
    write_evaluation(first, 4, [[0.0], [1.0]], ["math", "math"], f"{MORE} in version 4")
    write_evaluation(make_run(folder / "other", steps=2), 2, [[1.0], [1.0]], ["math", "math"])
    return folder


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "rl_async.launcher.cli", "view", str(runs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        for run in ("first", "other"):
            wait_for_index(url, run)
        yield url
        server.terminate()


def wait_for_index(url: str, run: str) -> None:
    """Wait until every file of a run can be found, whichever test comes first."""
    with httpx.Client(follow_redirects=True) as client:
        client.get(url).raise_for_status()
        for _ in range(600):
            state = client.get(f"{url.partition('/open/')[0]}/api/runs/{run}/choices").raise_for_status().json()
            if state["progress"]["looked"] and state["progress"]["indexed"] == state["progress"]["files"]:
                return
            time.sleep(0.1)
    raise AssertionError(state)


@pytest.fixture
def tab(browser: Any, address: str) -> Iterator[Tab]:
    made = Tab(browser, address)
    yield made
    made.close()


def test_a_curve_moves_while_the_run_trains(tab: Tab, runs: Path) -> None:
    page = tab.open("/run/other")
    reward = page.locator("figure", has_text="reward").first
    reward.locator("canvas").wait_for()
    page.get_by_text("2 / 2").wait_for()
    before, pixels = reward.inner_text(), reward.screenshot()
    rows = make_rows(2)
    for row in rows:
        row.reward = 0.875
    write_step(runs / "other", 2, rows)
    reward.get_by_text("0.875").wait_for()
    assert "0.875" not in before and reward.screenshot() != pixels
    page.get_by_text("3 / 2").wait_for()


def test_a_run_is_described_and_its_reward_comes_first(tab: Tab, runs: Path) -> None:
    page = tab.open("/run/first")
    about = page.get_by_label("about the run")
    for name in ("state", "model", "started"):
        about.get_by_text(name, exact=True).wait_for()
    about.get_by_text(str(runs / "model")).wait_for()
    page.locator("figure canvas").first.wait_for()
    assert page.locator("figcaption b").first.inner_text() == "reward"


def test_a_click_on_a_head_sorts_either_way(tab: Tab) -> None:
    page = tab.open("/trajectories/first")
    page.get_by_role("button", name="tokens", exact=True).click()
    longest = page.locator("tr.at", has_text="endless")
    longest.wait_for()
    page.locator("th[aria-sort=descending]", has_text="tokens").wait_for()
    page.get_by_role("button", name="tokens ▼").click()
    page.locator("th[aria-sort=ascending]", has_text="tokens").wait_for()
    longest.wait_for(state="detached")


def test_rows_are_filtered_and_grouped_by_what_is_written(tab: Tab) -> None:
    page = tab.open("/trajectories/first")
    field = page.get_by_label("filter", exact=True)
    field.fill("partition = train and step >= 1 group by step")
    field.press("Enter")
    page.get_by_text("3 values of step").wait_for()
    page.get_by_role("button", name="2", exact=True).click()
    page.get_by_text("16 trajectories").wait_for()
    assert field.input_value() == "partition = train and step >= 1 and step = 2"
    field.fill("rewards > 1")
    field.press("Enter")
    page.locator("p.problem", has_text="reward").wait_for()
    field.fill("")
    field.press("Enter")
    page.locator("p.problem").wait_for(state="detached")
    # The browser itself tells of the refused request.
    assert len(tab.complaints) == 1
    tab.complaints.clear()


def test_a_run_that_cannot_be_talked_to_says_why(tab: Tab) -> None:
    """Conversations themselves are tested with models, in tests/unit/launcher/runs/test_replay_episode.py."""
    page = tab.open("/chat/first")
    page.get_by_label("say").fill("hello")
    page.get_by_label("say").press("Enter")
    page.get_by_text("hello").wait_for()
    page.locator("p.problem", has_text="checkpoint").wait_for()
    page.get_by_role("button", name="new conversation").click()
    page.get_by_text("hello").wait_for(state="detached")


def test_a_trajectory_is_found_by_what_was_said(tab: Tab) -> None:
    page = tab.open("/trajectories/first")
    page.get_by_text("trajectories", exact=False).first.wait_for()
    page.keyboard.press("/")
    page.keyboard.type("no_such_page")
    page.locator("p", has_text="1 trajectories").wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="step 1, group 4").wait_for()
    page.get_by_text("TimeoutError: too slow").wait_for()
    page.locator(".reason", has_text="exact 0").get_by_text("the page is missing").wait_for()
    page.get_by_text("no_such_page").wait_for()


def test_a_masked_token_is_explained(tab: Tab) -> None:
    page = tab.open("/trajectory/first/train-2-8-0-0")
    page.locator(".token.masked").first.wait_for()
    page.keyboard.press("n")
    story = page.get_by_label("the story of a token")
    for words in ("masked", "token_k3", "version 2", "+1.5", "changes nothing"):
        story.get_by_text(words).first.wait_for()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    story.get_by_text("weight 0.5").wait_for()
    story.get_by_text("pushed the token's probability up").wait_for()
    page.get_by_label("colour by").select_option("difference")
    page.keyboard.press("Escape")
    assert story.count() == 0


def test_messages_of_one_prompt_share_its_tokens(tab: Tab) -> None:
    page = tab.open("/trajectories/first?text=demanded")
    page.locator("tbody tr").first.click()
    prompt = page.locator("article", has_text="what is demanded")
    prompt.get_by_text("what is asked").wait_for()
    assert page.locator("article").count() == 2
    prompt.locator("summary").click()
    prompt.locator(".token[data-at='0']").click()  # of which there is one
    story = page.get_by_label("the story of a token")
    story.get_by_text("the prompt of system, user").wait_for()


def test_messages_are_shown_without_a_tokenizer(tab: Tab) -> None:
    page = tab.open("/trajectories/other?text=no_such_page")
    page.locator("tbody tr").first.click()
    page.locator("article.assistant").get_by_text("script>document.title").first.wait_for()
    page.get_by_text("tokens by their ids", exact=False).first.wait_for()
    page.locator(".strip").click(position={"x": 700, "y": 8})
    page.locator("article.assistant .token.chosen").wait_for()


def test_a_problem_is_told_until_it_is_over(tab: Tab, runs: Path) -> None:
    page = tab.page
    page.route("**/api/runs", lambda route: route.fulfill(content_type="text/plain", body="Internal Server Error"))
    page.route("**/api/runs/other/config", lambda route: route.fulfill(content_type="text/plain", body="?"))
    page.reload()
    tab.open("/run/other")
    page.locator(".problem", has_text="answered 200 to runs").first.wait_for()
    page.locator("details", has_text="config").locator(".problem", has_text="runs/other/config").wait_for(
        state="attached"
    )
    page.unroute("**/api/runs")
    write_evaluation(runs / "other", 1, [[1.0]], ["math"])
    page.get_by_label("steps").wait_for()
    page.locator("p.problem.page").wait_for(state="detached")


def test_nothing_that_a_model_said_is_interpreted(tab: Tab) -> None:
    page = tab.open("/trajectories/first?text=worst")
    page.locator("tbody tr").first.click()
    page.locator(".tokens .token").first.wait_for()
    assert page.title() == "rl-async" and page.locator("#app script").count() == 0
    said = page.locator("article.assistant .tokens")
    assert "<script>document.title='owned'</script>" in said.inner_text()
    assert said.locator(".hidden-character").all_inner_texts() == ["ESC", "ESC", "U+202E"]


def test_a_line_without_end_is_read_in_parts(tab: Tab) -> None:
    page = tab.open("/trajectories/first?text=endless")
    page.locator("tbody tr").first.click()
    page.locator(".strip").wait_for()
    page.get_by_text("show all 1,048,576 characters").wait_for()
    page.get_by_text("cut: 4,000,000 characters in all").wait_for()
    page.locator(".tokens .token").first.wait_for()
    assert 0 < page.locator(".tokens .token").count() < LONG_TOKENS / 4, (
        "only what is looked at is drawn token by token"
    )
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.locator(".strip").click(position={"x": 700, "y": 8})
    page.locator(".token.chosen").wait_for()


def test_two_runs_are_compared(tab: Tab) -> None:
    page = tab.open("/run/first")
    page.locator(".runs label", has_text="first").locator("input:disabled").wait_for()
    page.get_by_label("other").check()
    table = page.locator(".config table")
    table.get_by_text("trainer.steps").wait_for()
    keys = table.locator("th[scope=row]").all_inner_texts()
    assert keys == ["model.path", "name", "trainer.steps"], "what both have alike is left out"
    page.locator("figure", has_text="reward").first.locator(".value").nth(1).wait_for()  # of the other run
    page.get_by_label("search metrics").fill("lineage")
    page.locator("figure", has_text="lineage").wait_for()


def test_evaluations_show_regressions_first(tab: Tab) -> None:
    page = tab.open("/evaluation/first")
    first = page.locator(".compared tbody tr").first
    first.wait_for()
    assert "question 0" in first.inner_text() and "−1" in first.inner_text()
    first.locator("button").click()
    for version in (0, 4):
        answer = page.get_by_role("region", name=f"version {version}")
        answer.locator("article.assistant", has_text=f"in version {version}").wait_for()
    assert page.locator(".opened article.user", has_text="question 0").count() == 1, "both were asked the same"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    first.locator("a").last.click()
    page.get_by_role("heading", name="version 4").wait_for()


def test_evaluations_of_two_runs_are_compared(tab: Tab) -> None:
    page = tab.open("/evaluation/first")
    page.get_by_label("compared with").select_option("other")
    page.locator(".compared th", has_text="other, version 2").wait_for()
    line = page.locator("table.evaluations").last.locator("tbody tr")
    source, tasks, before, after, changed, worse, better, p = line.locator("td").all_inner_texts()
    assert (source, tasks, before, after, worse, better, p) == ("math", "2", "0.5", "1", "0", "1", "1")
    assert changed.startswith("+0.5 (")
    page.locator(".compared tbody tr", has_text="question 0").locator("a").last.click()
    page.get_by_role("heading", name="version 2").wait_for()
    told = page.request.get(tab.base + str(page.get_by_role("link", name="JSON").get_attribute("href"))).json()
    assert (told["task_id"], told["step"], told["reward"]) == ("test:0", 2, 1.0)
    assert page.get_by_label("run", exact=True).input_value() == "other"


def test_it_says_which_tool_fails_and_finds_its_calls(tab: Tab) -> None:
    page = tab.open("/trajectories/first")
    page.locator("details.usage summary").click()
    worst = page.locator("details.usage tbody tr").first
    assert worst.locator("td").all_inner_texts() == [
        "browser",
        "1",
        "1",
        "100 %",
        "500 ms",
        "500 ms",
        "1 × no_such_page",
    ]
    worst.get_by_role("link", name="1").click()
    page.locator("p", has_text="1 trajectories").wait_for()


def test_a_step_of_a_curve_leads_to_its_trajectories(tab: Tab) -> None:
    page = tab.open("/run/first")
    curve = page.locator("figure", has_text="reward").first.locator(".u-over")
    box = curve.bounding_box()
    assert box is not None
    curve.click(position={"x": box["width"] - 2, "y": box["height"] / 2})
    page.locator("p", has_text="3 trajectories").wait_for()
    assert page.get_by_label("step from").input_value() == page.get_by_label("step to").input_value() == "3"


@pytest.mark.parametrize(
    ("place", "unknown", "back"),
    [
        ("/run/none", "none", "/run/other"),
        ("/trajectory/none/train-2-8-0-0", "none", "/run/other"),
        ("/nothing/first", "nothing", "/run/first"),
        ("/trajectory/first/train-9-9-9-9", "train-9-9-9-9", "/trajectories/first"),
        ("/trajectory/first", "trajectory", "/trajectories/first"),
        ("/group/first/train-9-9", "group 9", "/trajectories/first"),
        ("/group/first", "group", "/trajectories/first"),
        ("/trajectories/first?order=none", "none", "/trajectories/first"),
    ],
)
def test_what_an_address_names_and_there_is_not_is_told_with_a_link_back(
    tab: Tab, place: str, unknown: str, back: str
) -> None:
    page = tab.open(place)
    page.locator(".problem", has_text=unknown).first.wait_for()
    assert page.get_by_text("Loading").count() == 0
    page.locator("main").get_by_role("link").first.click()
    page.wait_for_url(f"**{back}")
    page.locator("main :is(canvas, table)").first.wait_for()
    assert all("404" in complaint or "400" in complaint for complaint in tab.complaints)
    tab.complaints.clear()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_every_page_fits_its_window(browser: Any, address: str, size: str, scheme: str) -> None:
    tab = Tab(browser, address, size, scheme)
    places = ("run/first?with=other", "trajectories/first", "trajectory/first/train-2-8-0-0?token=4")
    grouped = "trajectories/first?where=group%20by%20step"
    for place in (*places, grouped, "group/first/train-1-4", "evaluation/first", "chat/first"):
        page = tab.open(f"/{place}")
        page.locator("main :is(canvas, table, article, textarea)").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), place
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(json.loads(ground.replace("rgb(", "[").replace(")", "]"))) < 380) is (scheme == "dark")
    tab.close()


# Type two words in the wrong order while the address takes over what was typed before.
TYPE_MORE = """addEventListener("hashchange", () => {
    const field = document.querySelector("input[type=search]");
    field.value = '"kind worst"';
    field.dispatchEvent(new Event("input", {bubbles: true}));
}, {once: true, capture: true})"""


def test_a_report_opens_from_disk(browser: Any, runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    command = [sys.executable, "-m", "rl_async.launcher.cli", "report", str(runs / "first"), str(out)]
    subprocess.run(command, check=True, timeout=200)
    tab = Tab(browser, out.as_uri())
    page = tab.page
    page.locator("figure canvas").first.wait_for()
    page.get_by_role("link", name="Trajectories").click()
    page.get_by_label("search trajectories").fill("worst kind")
    page.locator("p", has_text="1 trajectories").wait_for()
    assert page.get_by_role("link", name="Flow").count() == 0, "a report knows no processes"
    page.evaluate(TYPE_MORE)
    page.get_by_label("search trajectories").fill("worst")
    page.locator("p", has_text="0 trajectories").wait_for()
    page.get_by_label("search trajectories").fill("")
    page.get_by_label("order").select_option("weight")
    page.locator("tbody tr:first-child", has_text="question t8").wait_for()  # only step 2 has weights of 0
    page.get_by_label("search trajectories").fill('"worst kind"')
    page.locator("p", has_text="1 trajectories").wait_for()
    for signs, found in (("気が", 1), ("気い", 0), ("worst kind", 1)):
        page.get_by_label("search trajectories").fill(signs)
        page.locator("p", has_text=f"{found} trajectories; the run has 55").wait_for()
    page.locator("tbody tr").first.click()
    page.locator(".tokens .token").nth(3).click()
    page.get_by_label("the story of a token").get_by_text("+1.5").first.wait_for()
    assert page.title() == "rl-async report"
    page.get_by_role("link", name="Evaluation").click()
    page.locator(".compared tbody tr").first.wait_for()
    for place in ("/group/first/train-9-9", "/trajectory/first/train-9-9-9-9", "/run/none", "/flow/first"):
        tab.open(place).locator("main .problem").get_by_role("link").wait_for()
    tab.close()
