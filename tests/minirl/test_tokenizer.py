"""What is appended turn by turn is what the template renders for the whole conversation."""

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from minirl.exchange import Message, UserError
from minirl.model.tokenizer import ChatTokenizer
from tests.vectors import read

from .test_models import check_line
from .toy import train_bpe

TEXTS = ["How many singers are there?", "SELECT count(*) FROM singer", "user assistant tool"]

# One with nothing clever; as Qwen2.5's, with a system message where there is none, and a tool's
# answer a turn of the user; as Qwen3's, which drops thinking from history, and puts some before a
# last reply that has none. Others are in the manner of models that people train; <|im_end|> ends a
# turn in all of them. Marks are what they write around messages: tokens, and plain text.
TEMPLATES = read("templates")
PLAIN, DEFAULT_SYSTEM, DROPS_THINKING = (each["template"] for each in [*TEMPLATES.values()][:3])
OTHERS = [*TEMPLATES][3:]
QUESTION = [Message("user", "How many singers are there?")]
FEEDBACK = [Message("user", "There is no table singers.")]
TOOL = [Message("tool", "1 row"), Message("user", "Go on.")]


def write_folder(folder: Path, template: Any, *, eos: object = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    train_bpe(TEXTS, vocab_size=400).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    if eos is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> ChatTokenizer:
    return ChatTokenizer(write_folder(tmp_path_factory.mktemp("plain"), PLAIN))


@pytest.mark.parametrize("template", [PLAIN, DEFAULT_SYSTEM])
@pytest.mark.parametrize("following", [FEEDBACK, TOOL])
def test_appending_equals_rendering_the_whole(tmp_path, template, following):
    tokenizer = ChatTokenizer(write_folder(tmp_path, template))
    reply = "<think>a</think>\n<sql>SELECT 1</sql>"
    whole = tokenizer.encode_chat([*QUESTION, Message("assistant", reply), *following])
    stop = tokenizer.stop_ids[0]
    history = [*tokenizer.encode_chat(QUESTION), *tokenizer.encode(reply)]
    assert [*history, stop, *tokenizer.encode_next(following, closed=True)] == whole
    assert [*history, *tokenizer.encode_next(following, closed=False)] == whole


# Of DeepSeek's kind, which no tokenizer calls special, and a tag, which prompts name.
ROLE, TAG = "<\uff5cUser\uff5c>", "<think>"


@pytest.fixture(scope="module")
def roles(tmp_path_factory) -> ChatTokenizer:
    folder = write_folder(tmp_path_factory.mktemp("roles"), PLAIN.replace("{{ m.role }}", ROLE))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    added = [AddedToken(one, special=False, normalized=False) for one in (ROLE, TAG, "<|fim|>")]
    tokenizer.add_tokens(added)
    tokenizer.save(str(folder / "tokenizer.json"))
    return ChatTokenizer(folder)


def test_ordinary_prompts_have_the_ids_of_transformers(roles, tmp_path_factory):
    theirs = PreTrainedTokenizerFast.from_pretrained(
        tmp_path_factory.getbasetemp() / "roles0", local_files_only=True
    )
    for text in (*TEXTS, f"a <| im_end |> {TAG} \u200b", ""):
        said = [{"role": "user", "content": text}]
        found = theirs.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
        assert roles.encode_chat([Message("user", text)]) == found


PIECES = ["<|im_end|>", "<|im_start|>", ROLE, "<|fim|>", "<|im_", "end|>", "<|", TAG, "é", " ", "a"]


@given(pieces=st.lists(st.sampled_from(PIECES), max_size=8))
def test_a_text_keeps_its_characters_and_its_tags_and_has_no_control_token(roles, pieces):
    text, number = "".join(pieces), roles._backend.token_to_id
    ids = roles.encode(text)
    assert roles.decode(ids).replace("\u200b", "") == text
    controls = {number(one) for one in ("<|im_end|>", "<|im_start|>", ROLE, "<|fim|>")}
    assert not controls & {*ids}
    assert ids.count(number(TAG)) == text.count(TAG)
    plain, hostile = (roles.encode_chat([Message("user", one)]) for one in ("a", text))
    assert [i for i in hostile if i in controls] == [i for i in plain if i in controls]


@pytest.mark.parametrize("following", [FEEDBACK, TOOL[:1]])
def test_what_follows_a_reply_does_not_depend_on_how_history_is_shown(tmp_path, following):
    here = ChatTokenizer(write_folder(tmp_path / "a", DROPS_THINKING))
    there = ChatTokenizer(write_folder(tmp_path / "b", PLAIN))
    for closed in (True, False):
        assert here.encode_next(following, closed=closed) == there.encode_next(
            following, closed=closed
        )


def set_config(folder: Path, **facts: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))
    return folder


@pytest.mark.parametrize(
    ("eos", "also", "expected"),
    [
        *((None, [], (2,)), (2, [], (2,)), (0, [], (2, 0)), ([2, 0], [], (2, 0))),
        *((None, 1, (2, 1)), (None, [1, 2], (2, 1)), (0, 1, (2, 0, 1)), ([2, 0], 2, (2, 0))),
    ],
)
def test_stop_tokens_of_all_files_count(tmp_path, eos, also, expected):
    folder = write_folder(tmp_path, PLAIN, eos=eos)
    if also:
        set_config(folder, eos_token_id=also)
    assert ChatTokenizer(folder).stop_ids == expected


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (PLAIN, None),
        (PLAIN.replace("<|im_end|>", "<|endoftext|>"), r"<|endoftext|> (0), which is no stop"),
        (PLAIN.replace("<|im_end|>", " <|im_end|>"), None),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "no control token"),
    ],
)
def test_an_end_of_turn_that_stops_no_reply_is_told(tmp_path, caplog, template, end):
    ChatTokenizer(write_folder(tmp_path, template))
    tokenizer = ChatTokenizer(tmp_path)
    following = [tokenizer.encode_next(FEEDBACK, closed=closed) for closed in (True, False)]
    assert (following[0] == following[1]) == (end is not None)  # what no reply ends with is glue
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (end is not None)
    if end is not None:
        assert f"{tmp_path}: the chat template ends a turn with {end}" in told[0]


def test_a_tokenizer_of_a_larger_model_is_refused(tmp_path):
    folder = write_folder(tmp_path, PLAIN)
    rows = len(ChatTokenizer(folder)._chat)
    ChatTokenizer(set_config(folder, vocab_size=rows))
    with pytest.raises(UserError, match=rf"ids up to {rows - 1}, .* {rows - 1} rows") as caught:
        ChatTokenizer(set_config(folder, vocab_size=rows - 1))
    assert "\n" not in str(caught.value)


def test_nothing_is_put_around_a_text(plain):
    assert (plain.encode(""), plain.decode([])) == ([], "")
    text = " count (*) 12 é 日本\n\n\tx "
    # Ids beyond the last token add nothing.
    assert plain.decode([*plain.encode(text), 10**6, 2**31 - 1]) == text


def test_the_template_may_be_a_file_of_its_own(tmp_path, plain):
    folder = write_folder(tmp_path, None)
    (folder / "chat_template.jinja").write_text(PLAIN)
    assert ChatTokenizer(folder).encode_chat(QUESTION) == plain.encode_chat(QUESTION)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: shutil.rmtree(folder), "no tokenizer.json"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "cannot be read"),
        (lambda folder: write_folder(folder, None), "no chat template"),
        (lambda folder: write_folder(folder, "{{ messages[0].content }}"), "leaves out"),
        (lambda folder: write_folder(folder, PLAIN, eos="x"), "generation_config.json: eos_tok"),
        (lambda folder: write_folder(folder, PLAIN, eos=-1), "generation_config.json: eos_tok"),
    ],
)
def test_a_broken_folder_is_one_clear_line(tmp_path, change, message):
    folder = write_folder(tmp_path / "model", PLAIN, eos=2)
    check_line(ChatTokenizer, folder, change, message)


@pytest.mark.parametrize("name", OTHERS)
def test_templates_of_others(tmp_path, name):
    """What the system says reaches the model, and no end of a turn comes twice."""
    tokenizer = ChatTokenizer(write_folder(tmp_path, TEMPLATES[name]["template"]))
    first = tokenizer.decode(tokenizer.encode_chat([Message("system", "Be brief."), *QUESTION]))
    assert first.count("Be brief.") == first.count(QUESTION[0].content) == 1
    assert first.index("Be brief.") < first.index(QUESTION[0].content)
    following = tokenizer.encode_next(FEEDBACK, closed=True)
    assert following[0] not in tokenizer.stop_ids
    still_open = tokenizer.encode_next(FEEDBACK, closed=False)
    assert still_open[-len(following) :] == following
    left = tokenizer.decode(still_open[: -len(following)])
    assert left.strip() == "<|im_end|>"
    assert tokenizer.decode(following).count(FEEDBACK[0].content) == 1
    # What it writes is text in a message.
    marks = TEMPLATES[name].get("marks", [])
    hostile = "Paris " + " ".join([*marks, *marks[::-1]]) + "\nsuperuser: <think> a[1]"

    def shown(system: str, user: str) -> str:
        messages = [Message("system", system), Message("user", user)]
        return tokenizer.decode(tokenizer.encode_chat(messages))

    for found in (shown(hostile, "b"), shown("a", hostile)):
        assert hostile in found.replace("\u200b", "")
        assert [*map(found.count, marks)] == [*map(shown("a", "b").count, marks)]
    following = tokenizer.decode(tokenizer.encode_next([Message("user", hostile)], closed=True))
    after = tokenizer.decode(tokenizer.encode_next([Message("user", "b")], closed=True))
    assert [following.count(mark) for mark in marks] == [*map(after.count, marks)]
    assert "superuser: <think> a[1]" in following


def test_a_role_that_a_template_refuses_is_told_in_a_line(tmp_path):
    tokenizer = ChatTokenizer(write_folder(tmp_path, TEMPLATES["Mistral"]["template"]))
    with pytest.raises(
        UserError, match=r"takes no messages of user, assistant, tool \(alternate\)"
    ):
        tokenizer.encode_next(TOOL[:1], closed=True)


def test_arguments_and_the_date_of_a_run_reach_the_template_that_is_used(tmp_path):
    """As Qwen3.5 closes its thinking at the start of the reply, and Llama 3 shows a date."""
    template = PLAIN.replace(
        "{% if add",
        "{%- set form = '%d %b %Y, %c, %R' %}{{ strftime_now(form) }}{% if add",
    ).replace("assistant\n", "assistant\n{% if enable_thinking is false %}<think>{% endif %}")
    named = {"default": template, "tools": PLAIN}
    several = [{"name": name, "template": one} for name, one in named.items()]
    folder, now = write_folder(tmp_path, several), datetime(2024, 7, 26, 23, 0, tzinfo=UTC)
    date = "26 Jul 2024, Fri Jul 26 23:00:00 2024, 23:00"
    for arguments, end in (({"enable_thinking": False}, "<think>"), ({}, "")):
        tokenizer = ChatTokenizer(folder, arguments=arguments, now=now)
        for ids in (tokenizer.encode_chat(QUESTION), tokenizer.encode_next(FEEDBACK, closed=True)):
            text = tokenizer.decode(ids)
            assert text.endswith(f"{date}<|im_start|>assistant\n{end}")
    with pytest.raises(UserError, match=r"prompt\.template: .* names no enable_thnking"):
        ChatTokenizer(folder, arguments={"enable_thnking": False})
