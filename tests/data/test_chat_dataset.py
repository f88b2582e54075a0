"""Conversations, prompts and pairs become packed rows; which tokens are trained is proved."""

import gzip
import json
from functools import cache, partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import forgekit as fk
from forgekit.data.chat import chat_dataset, preference_dataset
from forgekit.data.chat_template import ChatEncoder

WORDS = "{{ m.content }}"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INSTRUCT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
TOOLS = "{% for t in tools or [] %}<|im_start|>tool\n{{ t | tojson }}<|im_end|>\n{% endfor %}"
TOOLS += CHATML.replace(
    WORDS,
    "{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c | tojson }}</call>{% endfor %}",
)
FORGETFUL = CHATML.replace(  # earlier turns lose what they thought
    WORDS,
    "{{ m.content if m.role == 'assistant' and loop.last else m.content.split('</think>')[-1] }}",
)

USER = {"role": "user", "content": "What is two and two?"}
ANSWER = {"role": "assistant", "content": "Four, I think."}
MORE = [{"role": "user", "content": "And three?"}, {"role": "assistant", "content": "Five."}]


@cache
def _base() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)  # as GPT-NeoX does
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = ["Answer: Four, I think. user assistant What is two and two?\nBe brief.\n"] * 8
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken("<end>", special=False)])
    return tokenizer.to_str()


def _tokenizer(template: str | None, *, adds: str = "$A", eos: str | None = "</s>"):
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer.from_str(_base())
    if adds != "$A":
        ends = [("<s>", 0), ("</s>", 1)]
        tokenizer.post_processor = processors.TemplateProcessing(adds, special_tokens=ends)
    special = {"bos_token": "<s>", "eos_token": eos, "pad_token": "</s>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = template
    return fast


def _encode(template, messages, turn_by_turn=False, **options):
    encoder = ChatEncoder(_tokenizer(template), turn_by_turn)
    return encoder.conversation("line:1", messages, **options)


def _write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def _prompt(tokenizer, messages):
    """Ids that a model goes on from."""
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def _trained_text(tokenizer, example):
    return tokenizer.decode(example.ids[example.trained], clean_up_tokenization_spaces=False)


def _documents(rows):
    """Ids, labels and number of each document in its row."""
    for row in rows:
        for number in range(int(row["doc_ids"].max()) + 1):
            mine = row["doc_ids"] == number
            assert row["position_ids"][mine].tolist() == list(range(int(mine.sum())))
            yield row["input_ids"][mine].tolist(), row["labels"][mine].tolist(), number


@pytest.mark.parametrize("template", [INSTRUCT, TOOLS], ids=["instruct", "tools"])
@given(turn=st.sampled_from([1, 3]), words=st.text("abc é🙂.\n", max_size=12))
@settings(max_examples=12, deadline=None)
def test_the_ids_are_the_templates_and_a_turns_words_and_its_end_are_trained(template, turn, words):
    tokenizer = _tokenizer(template)
    chat = [USER, ANSWER, *MORE, USER]
    chat = [*chat[:turn], {**chat[turn], "content": words}, *chat[turn + 1 : turn + 2]]
    for messages in (chat, chat[:-1]):
        (example,) = _encode(template, messages, first=turn)
        ids = tokenizer.apply_chat_template(messages, return_dict=False)
        assert example.ids.tolist() == ids
        assert ids.count(tokenizer.bos_token_id) == (template == INSTRUCT)
        written = f" {words.strip()}</s>" if template == INSTRUCT else f"{words}<|im_end|>"
        assert _trained_text(tokenizer, example) == written
        start = len(_prompt(tokenizer, messages[:turn]))
        stop = start + int(example.trained.sum())
        assert example.trained[start:stop].all()


def test_a_template_that_writes_todays_date_gives_the_same_rows_every_day():
    day = "\n  {% set day = strftime_now('%d %b %Y') if strftime_now is defined %}{{ day }}"
    (example,) = _encode(day + CHATML, [USER, ANSWER])
    assert _tokenizer(CHATML).decode(example.ids).startswith("\n26 Jul 2024<|im_start|>user")


CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "with": [2, 2]}]}


@pytest.mark.parametrize("silent", [None, ""])
def test_words_beside_a_tool_call_are_proved_whatever_stood_in_lines_before(silent):
    either = TOOLS.replace("m.content or ''", "m.content if not m.tool_calls")  # as Llama 3.1 does
    encoder = ChatEncoder(_tokenizer(either))
    encoder.conversation("line:1", [USER, {**CALL, "content": silent}])
    with pytest.raises(ValueError, match=r"line:2: other words .* or do not appear in it"):
        encoder.conversation("line:2", [USER, {**CALL, "content": "Let me see."}])


def test_each_line_is_proved_with_its_own_options_and_flags():
    count = "<|im_end|>{% if loud and loop.index0 == 3 %}{{ m.content | length }}{% endif %}"
    encoder = ChatEncoder(_tokenizer(CHATML.replace("<|im_end|>", count)))
    chat = [USER, ANSWER, *MORE]
    untrained = [*chat[:3], {**chat[3], "weight": 0}]
    encoder.conversation("line:1", chat)
    encoder.conversation("line:2", untrained, options={"loud": True})
    with pytest.raises(ValueError, match="line:3: other words in message 3 also change"):
        encoder.conversation("line:3", chat, options={"loud": True})
    encoder.conversation("line:4", chat, options='{"loud": false}')


def test_a_template_that_forgets_reasoning_is_refused_or_rendered_turn_by_turn():
    thought = {"role": "assistant", "content": "<think>2 + 2</think>Four."}
    chat = [USER, thought, *MORE]
    with pytest.raises(ValueError, match=r"line:1: the chat template re-renders message 1 once"):
        _encode(FORGETFUL, chat)
    tokenizer = _tokenizer(FORGETFUL)
    first, second = _encode(FORGETFUL, chat, turn_by_turn=True)
    assert _trained_text(tokenizer, first) == "<think>2 + 2</think>Four.<|im_end|>"
    assert _trained_text(tokenizer, second) == "Five.<|im_end|>"
    assert "2 + 2" not in tokenizer.decode(second.ids)
    for example, count in ((first, 1), (second, 3)):  # each goes on from what is prompted
        prompt = _prompt(tokenizer, chat[:count])
        assert example.ids[: len(prompt)].tolist() == prompt
        assert (example.trained == (np.arange(len(example.ids)) >= len(prompt))).all()


TO_PROVE = [USER, {**ANSWER, "content": "Four</s>, I think."}, *MORE]
REFUSED = {  # a change of the template, and messages
    r"message 1 with '.*<end>\\n', which has no special": ("<|im_end|>", "<end>"),
    "message 1 with '.*</s>, I think.', which has no special": (
        *("<|im_end|>", "{% if '</s>' not in m.content %}<|im_end|>{% endif %}"),
    ),
    r"0 with '.*<think>\\n', and message 1 does not continue": ("t\n{% e", "t\n<think>\n{% e"),
    "message 1 also change the text outside": ("<|im_end|>", "<|im_end|>{{ m.content | length }}"),
    "do not appear in it": (WORDS, "{% if m.role == 'user' %}{{ m.content }}{% endif %}"),
    'omits the call of "add" in message 1': ("", "", [USER, {**CALL, "content": ""}]),
    "cannot be rendered: no": (WORDS, "{{ raise_exception('no') }}"),
    'no assistant turn to train; its roles are "user"': ("", "", [USER]),
    "messages contain 'hello'": ("", "", "hello"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_proved_is_refused(message):
    text, other, *messages = *REFUSED[message], TO_PROVE
    with pytest.raises(ValueError, match=rf"^line:1:? .*{message}"):
        _encode(CHATML.replace(text, other), messages[0])


@pytest.mark.parametrize("adds", ["$A", "<s> $A", "<s> $A </s>"])
@pytest.mark.parametrize("prompt", ["Answer: ", "<s>Answer: ", ""])
@pytest.mark.parametrize("completion", ["Four.", "Four.</s>"])
def test_a_completion_is_trained_with_its_end(adds, prompt, completion):
    tokenizer = _tokenizer(None, adds=adds)
    example = ChatEncoder(tokenizer).completion("line:1", prompt, completion)
    ids = example.ids.tolist()
    assert ids.count(tokenizer.bos_token_id) == ("<s>" in adds or "<s>" in prompt)
    assert (ids[-1], ids.count(tokenizer.eos_token_id)) == (tokenizer.eos_token_id, 1)
    assert _trained_text(tokenizer, example).lstrip() == "Four.</s>"
    chat = [USER, ANSWER]  # what a tokenizer adds is not added to what a template writes
    (example,) = ChatEncoder(_tokenizer(INSTRUCT, adds=adds)).conversation("line:1", chat)
    assert example.ids.tolist() == _tokenizer(INSTRUCT).apply_chat_template(chat, return_dict=False)
    with pytest.raises(ValueError, match="no eos_token"):
        ChatEncoder(_tokenizer(None, eos=None)).completion("line:1", prompt, "Four.")


def test_a_token_across_the_boundary_is_trained_and_counted(tmp_path):
    tokenizer = _tokenizer(None)
    assert "atĠisĠtwo" in tokenizer("What is two", add_special_tokens=False).tokens()
    example = ChatEncoder(tokenizer).completion("line:1", "Wha", "t is two")
    assert _trained_text(tokenizer, example) == "at is two</s>"
    lines = {"prompt": "Wha", "completion": "t is two"}, {"prompt": "", "completion": "Four."}
    rows = chat_dataset(_write(tmp_path / "a.jsonl", *lines), tokenizer, 32)
    assert "1 shared" in str(rows.counts)
    others = rows.counts.tokens - len(example.ids)  # all of them trained, and the first no target
    assert rows.counts.trained == example.trained.sum() + others - 1
    assert rows.counts.trained == (rows[0]["labels"] != -100).sum()


def test_packed_rows_hold_every_example_with_its_labels(tmp_path):
    """Also where one token ends a turn and fills the row: it is masked there by its position."""
    tokenizer = _tokenizer(INSTRUCT)
    chats = [[USER, ANSWER], [USER, ANSWER, *MORE], [USER, MORE[1]]] * 3
    file = _write(tmp_path / "a.jsonl", *({"messages": chat} for chat in chats))
    rows = chat_dataset(file, tokenizer, 96)
    expected = []
    for chat in chats:
        (example,) = ChatEncoder(tokenizer).conversation("", chat)
        labels = np.where(example.trained, example.ids, -100)[1:].tolist()
        expected.append((example.ids.tolist(), [*labels, -100]))
    assert sorted((ids, labels) for ids, labels, _ in _documents(rows)) == sorted(expected)
    assert len(rows) < len(chats)
    padding = [row["input_ids"][row["doc_ids"] == -1] for row in rows]
    assert any((ids == tokenizer.eos_token_id).any() for ids in padding)
    assert rows.counts.trained == sum(int((row["labels"] != -100).sum()) for row in rows)
    assert rows.counts.tokens == sum(len(ids) for ids, _ in expected)
    fk.check_batch(rows.__getitems__([0, 1]))


def test_lines_are_held_out_and_the_fingerprint_is_of_the_rows(tmp_path):
    tokenizer = _tokenizer(CHATML)
    tokenizer.save_pretrained(tmp_path / "model")
    file = _write(tmp_path / "a.jsonl", *[{"messages": [USER, ANSWER]}] * 6)
    rows = chat_dataset(file, tokenizer, 48, held_out_every=3)
    assert (rows.counts.lines, rows.held_out().counts.lines) == (4, 2)
    batch = next(iter(fk.make_loader(rows, batch_size=2, seed=0)))
    assert batch["labels"].shape == (2, 48)
    again = chat_dataset(file, tmp_path / "model", 48, held_out_every=3)
    assert again.fingerprint == rows.fingerprint
    assert again.vocab_size == rows.vocab_size == tokenizer.vocab_size + 1
    _write(file, *[{"messages": [USER, MORE[1]]}] * 6)
    assert chat_dataset(file, tokenizer, 48, held_out_every=3).fingerprint != rows.fingerprint


@pytest.mark.parametrize("length", [8, 26])
def test_a_long_example_is_cut_dropped_or_refused(tmp_path, length):
    tokenizer = _tokenizer(CHATML)
    tokenizer.backend_tokenizer.enable_truncation(4)  # which is for generation
    tokenizer.model_max_length = 4
    line = {"messages": [USER, ANSWER, *MORE]}
    (example,) = ChatEncoder(tokenizer).conversation("", line["messages"])
    short = {"prompt": "a", "completion": "b"}
    file = _write(tmp_path / "a.jsonl", short, line)
    with pytest.raises(ValueError, match=rf"jsonl:2 has {len(example.ids)} tokens; a .* {length}"):
        chat_dataset(file, tokenizer, length)
    dropped = chat_dataset(file, tokenizer, length, long="drop")
    assert (dropped.counts.dropped, dropped.counts.examples) == (1, 1)
    cut = chat_dataset(file, tokenizer, length, long="truncate")
    targets = int(example.trained[1:length].sum())
    assert (cut.counts.truncated, cut.counts.dropped) == (1, targets == 0)
    assert cut.counts.trained == dropped.counts.trained + targets
    assert cut.counts.tokens == dropped.counts.tokens + (length if targets else 0)


PAIRS = {
    "texts": {"prompt": "Answer: ", "chosen": "Four.", "rejected": "Five, I think."},
    "messages": {"prompt": [USER], "chosen": [ANSWER], "rejected": [MORE[1]]},
    "conversations": {"chosen": [USER, ANSWER], "rejected": [USER, MORE[1]]},
}


@pytest.mark.parametrize("line", PAIRS.values(), ids=PAIRS)
def test_both_answers_of_a_pair_are_neighbours_in_one_row(tmp_path, line):
    tokenizer = _tokenizer(CHATML)
    swapped = {**line, "chosen": line["rejected"], "rejected": line["chosen"]}
    rows = preference_dataset(_write(tmp_path / "a.jsonl", line, line, swapped), tokenizer, 128)
    assert [number % 2 for *_, number in _documents(rows)] == [0, 1] * 3
    texts = [text.strip() for text in _targets(rows, tokenizer)]
    good, bad = ("Four.</s>", "Five, I think.</s>")
    if not isinstance(line["chosen"], str):
        good, bad = (turn["content"] + "<|im_end|>" for turn in (ANSWER, MORE[1]))
    pairs = sorted(zip(texts[::2], texts[1::2], strict=True))
    assert pairs == sorted([(good, bad), (good, bad), (bad, good)])


def test_answers_that_begin_alike_or_are_alike_leave_each_its_last_message():
    tokenizer = _tokenizer(CHATML)
    chat = [USER, ANSWER, *MORE]
    for chosen, rejected, targets in (
        (chat, chat, ["Five.<|im_end|>"] * 2),
        (chat, [*chat[:3], ANSWER], ["Five.<|im_end|>", "Four, I think.<|im_end|>"]),
        (chat, chat[:2], ["Four, I think.<|im_end|>Five.<|im_end|>", "Four, I think.<|im_end|>"]),
    ):
        rows = preference_dataset([{"chosen": chosen, "rejected": rejected}], tokenizer, 256)
        assert _targets(rows, tokenizer) == targets
    same = {"prompt": "a", "chosen": "b", "rejected": "b"}
    assert len(_targets(preference_dataset([same], tokenizer, 64), tokenizer)) == 2


def _targets(rows, tokenizer):
    """The text of the targets of each document."""
    return [tokenizer.decode([i for i in labels if i != -100]) for _, labels, _ in _documents(rows)]


ARGUMENTS = {"city": "Paris", "days": [1, {"é": None}], "note": 'a "b"'}
WRITTEN = '{"city": "Paris", "days": [1, {"é": null}], "note": "a \\"b\\""}'
READERS = dict.fromkeys(("messages", "prompt"), chat_dataset) | {"chosen": preference_dataset}
CALLS = {  # how templates write the arguments
    "tojson": "{{ a | tojson }}",
    "a text": "{{ a }}",
    "joined": "{{ '' + a + '' }}",
    "either": "{% if a is string %}{{ a }}{% else %}{{ a | tojson }}{% endif %}",
    "concatenated": "{{ 'the ' ~ a }}",
    "mapping": "{% for k, v in a.items() %}{{ k }}={{ v | tojson }} {% endfor %}",
}


@pytest.mark.parametrize("case", CALLS)
@pytest.mark.parametrize("kind", READERS)
def test_arguments_as_json_are_those_of_the_object(case, kind):
    """In trained turns and prompts, whatever the template expects."""
    calls = "{% for c in m.tool_calls or [] %}{% set c = c.function or c %}<call>{{ c.name }} "
    calls += "{% set a = c.arguments %}" + CALLS[case] + "</call>{% endfor %}"
    tokenizer = _tokenizer(CHATML.replace(WORDS, "{{ m.content or '' }}" + calls))

    def document(arguments, nested=True, dump=False):
        call = {"name": "weather", "arguments": arguments}
        call = {"type": "function", "function": call} if nested else call
        calls = json.dumps([call]) if dump else [call]
        chat = [USER, {"role": "assistant", "content": None, "tool_calls": calls}]
        others = {"prompt": {"prompt": [*chat, USER], "completion": [ANSWER]}}
        others["chosen"] = {"chosen": chat, "rejected": [USER, ANSWER]}
        rows = READERS[kind]([others.get(kind, {"messages": chat})], tokenizer, 512)
        return tokenizer.decode(next(_documents(rows))[0]), _targets(rows, tokenizer)[0]

    named = "".join(f"{k}={json.dumps(v, ensure_ascii=False)} " for k, v in ARGUMENTS.items())
    wanted = {"mapping": named, "concatenated": f"the {WRITTEN}"}
    wanted = f"<call>weather {wanted.get(case, WRITTEN)}</call><|im_end|>"
    compact = json.dumps(ARGUMENTS, separators=(",", ":"))
    for arguments in (ARGUMENTS, WRITTEN, f" {compact}\n"):
        for how in ({}, {"nested": False}, {"dump": True}):
            text, trained = document(arguments, **how)
            assert wanted in text
            assert trained == ("Four, I think.<|im_end|>" if kind == "prompt" else wanted)
    empty = {"mapping": "", "concatenated": "the {}"}.get(case, "{}")
    assert all(f"<call>weather {empty}</call>" in document(a)[0] for a in (None, "", " ", {}))
    if case == "tojson":
        assert '<call>weather "plain words"</call>' in document("plain words")[0]
        assert "<call>weather [1]</call>" in document("[1]")[0]
    with pytest.raises(ValueError, match=r"line 0 has '\{\"city\": ' as arguments of a tool"):
        document('{"city": ')


BOTH = ["Four, I think.<|im_end|>", "Five.<|im_end|>"]
SPELLINGS = ["weight", "train", "training", "trainable", "loss", "loss_mask", "loss_weight"]
SPELLINGS += ["loss_scale"]


def test_flags_say_which_turns_are_targets_and_others_are_refused(caplog):
    tokenizer = _tokenizer(CHATML)

    def targets(first, second=None, line=None, turn=1, **options):
        chat = [USER, dict(ANSWER), MORE[0], {**MORE[1], **(second or {})}]
        chat[turn] = {**chat[turn], **first}
        rows = chat_dataset([{"messages": chat, **(line or {})}], tokenizer, 128, **options)
        ids, _, _ = next(_documents(rows))
        plain = [{key: m[key] for key in ("role", "content")} for m in chat]
        assert ids == tokenizer.apply_chat_template(plain, return_dict=False)
        return _targets(rows, tokenizer)[0]

    for key in SPELLINGS:
        for no, yes in ((0, 1), (0.0, 1.0), (False, True)):
            assert targets({key: yes}, {key: no}) == BOTH[0]
            assert targets({key: None}, {key: yes}) == "".join(BOTH)
            assert targets({key: no}, turn=0) == "".join(BOTH)
            with pytest.raises(ValueError, match="has a flag to train the role"):
                targets({key: yes}, turn=0)
        with pytest.raises(ValueError, match=r'are "user".*, and flags mask them all'):
            targets({key: 0}, {key: 0})
        for wrong in (0.5, "false", float("nan"), [1, 0]):
            with pytest.raises(ValueError, match=f'line 0: message 1 has .* as "{key}"; .* 0 or 1'):
                targets({key: wrong})
    assert targets({"masked": True}, {"masked": False}) == BOTH[1]
    assert targets({"weight": 1, "train": False}) == BOTH[1]
    for unknown in ("mask", "step_loss_mask", "train_detail"):
        with pytest.raises(ValueError, match=f'message 1 has "{unknown}", which may select what'):
            targets({unknown: 1})
    assert targets({}, train_on="last") == BOTH[1]
    assert targets({"weight": 0}, train_on="last") == BOTH[1]
    with pytest.raises(ValueError, match="flags mask them all"):
        targets({}, {"weight": 0}, train_on="last")
    for line in ({"weight": 1, "mask_prompt": True, "train_on_inputs": False}, {"weight": None}):
        assert targets({}, line=line) == "".join(BOTH)
    for line in ({"weight": 0}, {"mask_prompt": False}, {"train_on_inputs": True}, {"weight": 0.5}):
        with pytest.raises(ValueError, match=f"line 0 has .*{next(iter(line))}"):
            targets({}, line=line)
    assert targets({"mask": None, "step_loss_mask": None}) == "".join(BOTH)
    assert not caplog.records
    harmless = {"id": 7, "source": "web", "lang": None}
    targets({"name": "a", "score": 3}, {"score": 1, "constraint": 1}, line=harmless)
    assert caplog.messages == [
        "Keys that neither forgekit nor the chat template reads: "
        '"score" (2), "constraint" (1), "id" (1), "source" (1).'
    ]


def test_the_last_turn_alone_needs_no_template_that_keeps_earlier_ones():
    thought = {"role": "assistant", "content": "<think>2 + 2</think>Four."}
    chat, tokenizer = [USER, thought, *MORE, USER], _tokenizer(FORGETFUL)
    rows = chat_dataset([{"messages": chat}], tokenizer, 128, train_on="last")
    ids, _, _ = next(_documents(rows))
    assert ids == tokenizer.apply_chat_template(chat, return_dict=False)
    assert _targets(rows, tokenizer) == ["Five.<|im_end|>"]
    with pytest.raises(ValueError, match='train_on is \'first\'; it must be one of "all", "last"'):
        chat_dataset([{"messages": chat}], tokenizer, 128, train_on="first")


THINK = "{% set think = '<think></think>' %}{% set empty = '' if enable_thinking else think %}"
THINKS = CHATML.replace("assistant\n{% endif %}", "assistant\n{{ empty }}{% endif %}")
THINKS = THINK + THINKS.replace(WORDS, "{{ think if m.role == 'assistant' }}{{ m.content }}")


@pytest.mark.parametrize("kind", READERS)
def test_options_of_a_line_and_of_all_lines_reach_the_template(kind):
    tokenizer, read = _tokenizer(THINKS), READERS[kind]
    line = {"messages": [USER, ANSWER]} if kind == "messages" else PAIRS["messages"]
    line = {"prompt": [USER], "completion": [ANSWER]} if kind == "prompt" else line

    def rows(template=None, **options):
        given = {"chat_template_kwargs": options} if options else {}
        return read([{**line, **given}], tokenizer, 128, template=template)

    off, on = rows({"enable_thinking": False}), rows({"enable_thinking": True})
    assert _targets(off, tokenizer)[0] == "Four, I think.<|im_end|>"
    assert _targets(on, tokenizer)[0] == "<think></think>Four, I think.<|im_end|>"
    assert rows(enable_thinking=True).fingerprint == on.fingerprint != off.fingerprint
    assert rows().fingerprint == rows({}).fingerprint == off.fingerprint
    assert rows({"enable_thinking": False}, enable_thinking=True).fingerprint == on.fingerprint
    both = [{**line, "chat_template_kwargs": {"enable_thinking": on}} for on in (True, False)]
    thought = ["<think>" in text for text in _targets(read(both, tokenizer, 512), tokenizer)]
    assert thought.count(True) == len(thought) // 2
    with pytest.raises(ValueError, match='the chat template does not read "enable_thinkin"'):
        rows({"enable_thinkin": False})
    for key in ("tokenize", "continue_final_message", "chat_template"):
        with pytest.raises(ValueError, match="line 0: the messages cannot be rendered: "):
            rows(**{key: True})


TURNS = '"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": %s}]'
ONE = "{" + TURNS % '"Four."' + "}\n"
ODD = ONE.strip().replace("Four.", "a\u2028b\x85")
FILES = {  # content of a file, and the targets of its documents or the refusal
    "marks and blank lines": (f"\ufeff\r\n{ODD}\r\n\r\n \n{ODD}", ["a\u2028b\x85<|im_end|>"] * 2),
    "NaN": (ONE.replace('Four."', 'Four.", "weight": NaN'), 'has nan as "weight"'),
    "null content": ("{" + TURNS % "null" + "}", ["<|im_end|>"]),
    "no content": (ONE.replace(', "content": "Four."', ""), ["<|im_end|>"]),
    "empty turn": (ONE.replace("Four.", ""), ["<|im_end|>"]),
    "white space around": (ONE.replace("Four.", " Four.\\n "), [" Four.\n <|im_end|>"]),
    "no messages": ('{"messages": []}', "has no assistant turn to train; its roles are nothing"),
    "null messages": ('{"messages": null}', 'the keys "messages"; a line to train on'),
    **{
        f"words under {key}": (
            ONE.replace('"content": "Four."', f'"{key}": "Four."'),
            f'message 1 has no content, but "{key}", which nothing reads',
        )
        for key in ("value", "text", "message", "refusal")
    },
    "a value beside the content": (ONE.replace("Four.", 'a", "value": "b'), ["a<|im_end|>"]),
    "no role": (ONE.replace('"role": "user", ', ""), 'messages contain .* under "role"'),
}
SAID = {  # turns, and the targets
    "system in the middle": ("user assistant system user assistant", [2, 5]),
    "assistant twice": ("user assistant assistant", [2, 3]),
    "unknown role and tool": ("user critic assistant tool assistant user", [3, 5]),
}


@pytest.mark.parametrize("name", FILES)
def test_what_a_file_says_is_trained_or_refused(tmp_path, name):
    content, wanted = FILES[name]
    (tmp_path / "a.jsonl").write_bytes(content.encode())
    tokenizer = _tokenizer(CHATML.replace(WORDS, "{{ m.content or '' }}"))
    if isinstance(wanted, str):
        with pytest.raises(ValueError, match=f"a.jsonl:1.*{wanted}"):
            chat_dataset(tmp_path / "a.jsonl", tokenizer, 64)
    else:
        rows = chat_dataset(tmp_path / "a.jsonl", tokenizer, 64)
        assert _targets(rows, tokenizer) == wanted


@pytest.mark.parametrize("name", SAID)
def test_every_assistants_turn_is_trained_wherever_it_stands(name):
    roles, wanted = SAID[name]
    chat = [{"role": r, "content": f"<s>say {n}"} for n, r in enumerate(roles.split(), start=1)]
    tokenizer = _tokenizer(CHATML)
    rows = chat_dataset([{"messages": chat}], tokenizer, 256)
    ids, _, _ = next(_documents(rows))
    assert ids == tokenizer.apply_chat_template(chat, return_dict=False)
    assert ids.count(tokenizer.bos_token_id) == len(chat)  # a token that a text holds is that token
    assert _targets(rows, tokenizer) == ["".join(f"<s>say {n}<|im_end|>" for n in wanted)]
    tokenizer.split_special_tokens = True
    example = ChatEncoder(tokenizer).completion("", "a<s>", "b<|im_end|>")
    ids = tokenizer("a<s>b<|im_end|>", add_special_tokens=False)["input_ids"]
    assert example.ids.tolist() == [*ids, tokenizer.eos_token_id]
    assert tokenizer.bos_token_id not in ids


SYSTEM = {"system": "Be brief."}
BRIEF = {"role": "system", "content": "Be brief."}


def test_a_system_text_and_tools_of_a_line_are_rendered():
    tokenizer, tools = _tokenizer(TOOLS), [{"name": "add"}]
    chat = [USER, ANSWER]
    cases = [({"messages": chat, **SYSTEM}, [BRIEF, *chat], None)]
    cases += [({"prompt": [USER], "completion": [ANSWER], **SYSTEM}, [BRIEF, *chat], None)]
    for same in (tools, json.dumps(tools), [json.dumps(tools[0])]):
        cases += [({"messages": chat, "tools": same}, chat, tools)]
    cases += [({"messages": chat, "tools": ""}, chat, None)]
    for line, messages, described in cases:
        rows = chat_dataset([line], tokenizer, 256)
        ids, _, _ = next(_documents(rows))
        assert ids == tokenizer.apply_chat_template(messages, tools=described, return_dict=False)
        assert _targets(rows, tokenizer) == ["Four, I think.<|im_end|>"]
    with pytest.raises(ValueError, match="line 0 has 'add' as tools; a text there must be a JSON"):
        chat_dataset([{"messages": chat, "tools": "add"}], tokenizer, 64)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lines_are_read_from_every_kind_of_file_and_dataset(tmp_path):
    import datasets
    import pyarrow as pa
    import pyarrow.parquet

    calls = [{"function": {"name": "add", "arguments": {"a": 2}}, "id": "x"}]
    calls += [{"function": {"name": "negate", "arguments": {"b": 2}}, "id": "y"}]
    called = {"role": "assistant", "content": None, "tool_calls": calls}
    lines = [{"messages": [USER, ANSWER], "tools": '[{"name": "add"}]'}]
    lines += [{"messages": [USER, called, {"role": "tool", "content": "4"}, MORE[1]]}]
    tokenizer = _tokenizer(TOOLS)
    plain = _write(tmp_path / "a.jsonl", *lines)
    wanted = chat_dataset(plain, tokenizer, 256).fingerprint
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    (tmp_path / "array.json").write_text("\ufeff " + json.dumps(lines, indent=1))
    table = pa.Table.from_pylist([{"tools": None, **line} for line in lines])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    dataset = datasets.Dataset(table)
    dataset.save_to_disk(tmp_path / "saved")
    turns = {"user": "human", "assistant": "gpt", "tool": "observation"}

    def in_parts(message):
        text = message["content"]
        return {**message, "content": text and [text[:3], {"type": "text", "text": text[3:]}]}

    def shared(message):
        named = {"from": turns[message["role"]], "value": message["content"], **message}
        return {key: named[key] for key in named if key not in ("role", "content")}

    parts = [{**line, "messages": [*map(in_parts, line["messages"])]} for line in lines]
    turns_of = [{**line, "conversations": [*map(shared, line["messages"])]} for line in lines]
    others = parts, [{**line, "messages": None} for line in turns_of], dataset.to_iterable_dataset()
    files = ("a.jsonl.gz", "array.json", "a.parquet", "saved")
    for source in [*(tmp_path / file for file in files), dataset, *others]:
        assert chat_dataset(source, tokenizer, 256).fingerprint == wanted, source
    with pytest.raises(ValueError, match='the dataset has splits "train"; pass one'):
        chat_dataset(datasets.DatasetDict(train=dataset), tokenizer, 64)
    (tmp_path / "array.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"array.json\[0\] is 1; it must be"):
        chat_dataset(tmp_path / "array.json", tokenizer, 64)


LONG = {"prompt": "a" * 99, "completion": "b"}
PAIR = {"prompt": "a", "chosen": "b"}
DROP = partial(chat_dataset, long="drop")
LINES = {
    'a.jsonl:1 has the keys "text"; a line': (DROP, {"text": "a"}),
    "'a' as prompt and .* as completion": (DROP, {"prompt": "a", "completion": [ANSWER]}),
    "nothing is supervised: 0 examples of 1 lines.*1 dropped": (DROP, LONG),
    'has the keys "prompt", "chosen"; a preference': (preference_dataset, PAIR),
    r"a.jsonl:1 has \d+ tokens; a row has 16": (preference_dataset, PAIRS["messages"]),
    'a.jsonl:1 has "images"; only text': (DROP, {"messages": [USER, ANSWER], "images": ["a.png"]}),
    "contain .*'image_url'.* only parts of text": (
        *(DROP, {"messages": [{**USER, "content": [{"type": "image_url"}]}, ANSWER]}),
    ),
    'contain .*call.* "from" may be "human", "gpt"': (DROP, {"conversations": [{"from": "call"}]}),
    'a.jsonl:1 has "system" and a first message': (DROP, {"messages": [BRIEF, ANSWER], **SYSTEM}),
    "long is 'truncate'": (partial(preference_dataset, long="truncate"), LONG),
}


@pytest.mark.parametrize("message", LINES)
def test_a_line_that_cannot_be_trained_is_refused(tmp_path, message):
    read, line = LINES[message]
    with pytest.raises(ValueError, match=message):
        read(_write(tmp_path / "a.jsonl", line), _tokenizer(CHATML), 16)
