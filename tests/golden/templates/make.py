"""Makes tokenizer.json and the ids that `transformers` gives for chats under the template here. Not run by the tests.

PYTHONPATH=.:tests/serving:tests python tests/golden/templates/make.py      # beside transformers 5.24
"""

from __future__ import annotations

import json
from pathlib import Path

from tiny_tokenizers import FIRST_RESERVED, tokenizer_json
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
NAMES = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|image_pad|>")
CHATS: list[list[dict[str, object]]] = [
    [{"role": "user", "content": "hello world"}],
    [{"role": "system", "content": "Be  brief.\n"}, {"role": "user", "content": " 한 🙂 中a, 123 "}],
    [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "  hello \n", "reasoning_content": "no longer shown"},
        {"role": "user", "content": ""},
    ],
    [
        {"role": "user", "content": "say\n\nmore"},
        {"role": "assistant", "content": "world", "reasoning_content": "\nthink in\n\n"},
    ],
    [
        {
            "role": "user",
            "content": [{"type": "text", "text": "see "}, {"type": "image"}, {"type": "text", "text": " {x} {{ y }}"}],
        }
    ],
]


def main() -> None:
    content = tokenizer_json()
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content["added_tokens"] = [
        {"id": FIRST_RESERVED + i, "content": name, **plain, "special": "think" not in name}
        for i, name in enumerate(NAMES)
    ]
    path = HERE / "tokenizer.json"
    path.write_text(json.dumps(content, ensure_ascii=False) + "\n")
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(path))
    theirs.chat_template = (HERE / "chat_template.jinja").read_text()
    cases = []
    for chat in CHATS:
        for thinking in (False, True):
            ids = theirs.apply_chat_template(
                chat, add_generation_prompt=True, enable_thinking=thinking, return_dict=False
            )
            cases.append({"chat": chat, "thinking": thinking, "ids": ids})
    (HERE / "expected.json").write_text(json.dumps(cases, ensure_ascii=False) + "\n")
    print(len(cases), "cases", sum(len(case["ids"]) for case in cases), "ids")


if __name__ == "__main__":
    main()
