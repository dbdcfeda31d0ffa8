"""Every form of a row that is listed: accepted with its value, or refused with the place that the error names."""

from pathlib import Path

import pytest

from rl_async.agent_loop.training_data import read_chats
from rl_async.configs.schema.data import DataConfig, DataSource, ModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import DataError
from rl_async.launcher.runs.inspect_data import inspect
from rl_async.transfer_queue.dataset import check_first_rows, make_sources
from tests.support.data_forms import CHATS, FORMS, Form, tables, write

PAGE = Path(__file__).parents[3] / "docs/reference/data_forms.md"
TASKS = [form for form in FORMS if form not in CHATS]


def config_of(form: Form, path: Path) -> RunConfig:
    part = DataSource(path=str(path), ground_truth=form.template, prompt="x" if form.template else "")
    return RunConfig(model=ModelConfig(path="none"), data=DataConfig(path=(part,)))


@pytest.mark.parametrize("form", TASKS, ids=lambda form: form.name)
def test_a_row_of_tasks(form: Form, tmp_path: Path) -> None:
    path = write(form, tmp_path)
    config = config_of(form, path)
    if not form.refused:
        check_first_rows(config)
        task = make_sources(config)[0].next()
        assert getattr(task, form.part) == form.value
        return
    for check in (check_first_rows, make_sources):
        with pytest.raises(DataError) as caught:
            check(config)
        assert f"{path}" in str(caught.value) and form.refused in str(caught.value)
    if not form.template:
        with pytest.raises(DataError) as caught:
            list(inspect(DataSource(path=str(path))))
        assert form.refused in str(caught.value)


@pytest.mark.parametrize("form", CHATS, ids=lambda form: form.name)
def test_a_row_of_conversations(form: Form, tmp_path: Path) -> None:
    source = DataSource(path=str(write(form, tmp_path)))
    if not form.refused:
        (chat,) = read_chats(source)
        assert chat.messages == form.value
        return
    with pytest.raises(DataError) as caught:
        list(read_chats(source))
    assert f"{source.path}, {form.refused}" in str(caught.value)


def test_the_documentation_has_the_list() -> None:
    assert tables() in PAGE.read_text()
