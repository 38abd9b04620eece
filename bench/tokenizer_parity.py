"""Token ids of tilegrad beside those of llama.cpp, on random and adversarial strings.

    python bench/tokenizer_parity.py MODEL.gguf            a real vocabulary and the synthetic ones
    python bench/tokenizer_parity.py --peer PYTHON         the interpreter that has llama_cpp
    python bench/tokenizer_parity.py --freeze FILE         keep a small sample as test data

Synthetic vocabularies are small ones, trained here, one for each kind of pre-tokenizer and for
SentencePiece, written with the `gguf` package. Every string is encoded with control tokens taken
as words and with control tokens taken as tokens. Writes bench/results/tokenizer-<date>.json; exits
with 1 if any id differs.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import measure

PEER = """
import json, sys
import llama_cpp
from llama_cpp import Llama
model = Llama(sys.argv[1], vocab_only=True, verbose=False)
out = []
for text in json.load(open(sys.argv[2])):
    data = text.encode("utf-8")
    # add_bos asks for what the file says of special tokens around a text
    out.append([model.tokenize(data, add_bos=True, special=False),
                model.tokenize(data, add_bos=True, special=True)])
json.dump(out, open(sys.argv[3], "w"))
print(llama_cpp.__version__)
"""
TEXT = """The quick brown fox jumps over the lazy dog. It's what we've said, isn't it? I'm sure
they'll be there, you'd better go; THEY'LL SHOUT. Numbers: 1 12 123 1234 12345, 3.14159, 1,000,000.
def function(argument):\n    return argument + 1  # code\n\tif x != y:\n\t\tprint("a", 'b')\n
Für naïve Köche: Größe über Maß. Добрый день, мир! 你好，世界。こんにちは世界。안녕하세요 세계.
مرحبا بالعالم
שלום עולם नमस्ते दुनिया 👩‍👩‍👧 🎉🎉 ... --- === (((a))) [[b]] {{c}} <tag> </tag> http://example.com/a?b=c&d=e
"""
SCRIPTS = [
    (0x20, 0x7E), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x4FF), (0x590, 0x5FF),
    (0x600, 0x6FF), (0x900, 0x97F), (0xE00, 0xE7F), (0x1100, 0x11FF), (0x2000, 0x206F),
    (0x20A0, 0x20CF), (0x2150, 0x218F), (0x2460, 0x24FF), (0x2600, 0x27BF), (0x3000, 0x30FF),
    (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xE000, 0xE0FF), (0xFE00, 0xFEFF), (0xFF00, 0xFFEF),
    (0x10000, 0x100FF), (0x10140, 0x1018E), (0x1D400, 0x1D7FF), (0x1F300, 0x1FAFF),
    (0x20000, 0x2A6DF), (0xE0000, 0xE007F), (0xF0000, 0xF00FF), (0x10FF00, 0x10FFFF),
]  # fmt: skip
BLANKS = " \t\n\r\v\f\u0085\u00a0\u1680\u2000\u2003\u2028\u2029\u202f\u205f\u3000\u200b\ufeff\u180e"
CONTRACTIONS = [
    "'s",
    "'t",
    "'re",
    "'ve",
    "'m",
    "'ll",
    "'d",
    "'S",
    "'T",
    "'RE",
    "'Ve",
    "'lL",
    "'D",
    "'\u017f",
    "\u2019s",
    "''s",
    "'sx",
    " 's",
    "'r",
    "'v",
    "'l",
    "'",
]
LOOKALIKES = [
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<s>",
    "</s>",
    "<unk>",
    "<0x41>",
    "<0x0A>",
    "<|im_end|",
    "<|eot_id|>",
    "<|im_<|im_end|>end|>",
    "<user>",
    "<pad>",
    "<<s>>",
    "\u2581",
    "\u2581\u2581",
    "\u0120",
    "\u010a",
]
CLUSTERS = [
    "👩‍👩‍👧‍👦",
    "🏳️‍🌈",
    "🇩🇪🇫🇷",
    "👍🏽",
    "é",
    "ก็ู้",
    "Z͑ͫ̓ͪ̂ͫ̽",
    "각",
    "क्षि",
    "½²³",
    "Ⅷ",
    "①",
    "๑๒๓",
    "١٢٣",
    "𝟘𝟙",
    "ﬁ",
    "ǅ",
    "İ",
    "ß",
    "\u0000",
    "\u0001\u001f",
    "\u007f",
    "\ufffd",
    "\uffff",
]


def one_string(chance: random.Random) -> str:
    """A random string of one of several kinds."""

    def letters(low: int, high: int, count: int) -> str:
        return "".join(chr(chance.randint(low, high)) for _ in range(count))

    def part() -> str:
        kind = chance.randrange(11)
        if kind == 0:
            return letters(*chance.choice(SCRIPTS), chance.randint(1, 8))
        if kind == 1:
            return "".join(chance.choice(BLANKS) for _ in range(chance.randint(1, 6)))
        if kind == 2:
            return chance.choice([" ", "\n", "\t", "  \n", "\r\n"]) * chance.randint(1, 20)
        if kind == 3:
            return "".join(chance.choice("0123456789") for _ in range(chance.randint(1, 12)))
        if kind == 4:
            return chance.choice(CONTRACTIONS)
        if kind == 5:
            return chance.choice(LOOKALIKES)
        if kind == 6:
            return chance.choice(CLUSTERS)
        if kind == 7:
            start = chance.randrange(len(TEXT))
            return TEXT[start : start + chance.randint(1, 40)]
        if kind == 8:
            point = chance.randrange(0x110000 - 0x800)
            return chr(point if point < 0xD800 else point + 0x800)
        if kind == 9:
            return chance.choice("!?.,;:-_/\\|(){}[]<>=+*&^%$#@~`\"'") * chance.randint(1, 5)
        return chance.choice([" ", "a", "Word", " word", "ABC", "xYz"])

    return "".join(part() for _ in range(chance.randint(0, 12)))


def strings(count: int, seed: int = 0) -> list[str]:
    """Random strings, and every code point once in groups of 64 with letters around it."""
    chance = random.Random(seed)
    out = [one_string(chance) for _ in range(count)]
    points = [
        chr(p)
        for p in range(0x110000)
        if not 0xD800 <= p < 0xE000
        and (
            p < 0x3400
            or 0xA000 <= p < 0xAC10
            or 0xD7A0 <= p < 0xE010
            or 0xF8F0 <= p < 0x20010
            or 0x2A6C0 <= p < 0x2FA20
            or 0xE0000 <= p < 0xE0200
        )
    ]
    for start in range(0, len(points), 64):
        out.append("".join(f"{p}a 1{p}" for p in points[start : start + 64]))
    return out


# ---- synthetic vocabularies -------------------------------------------------------------------


def trained_pairs(kind: str) -> dict[str, Any]:
    """Metadata of a byte-pair vocabulary trained on the sample text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=700, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    texts = sorted(model["vocab"], key=model["vocab"].__getitem__)
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>"]
    words = ["<user>", "<pad>", "\u0120quick\u0120brown"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": kind,
        "tokenizer.ggml.tokens": texts + special + words,
        "tokenizer.ggml.token_type": [1] * len(texts) + [3] * len(special) + [4] * len(words),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": len(texts) + 3,
        "tokenizer.ggml.eos_token_id": len(texts) + 4,
    }


def trained_pieces(prefix: bool, ties: bool) -> dict[str, Any]:
    """Metadata of a SentencePiece vocabulary: byte tokens, pieces with scores, runs of spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(
        [TEXT] * 4, trainers.BpeTrainer(vocab_size=500, show_progress=False)
    )
    model = json.loads(tokenizer.to_str())["model"]
    learnt = sorted((t for t in model["vocab"] if t != "\n"), key=model["vocab"].__getitem__)
    head = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    runs = ["\u2581" * n for n in range(2, 9)]
    words = ["<user>", "<pad>", "\n\n", *([] if prefix else ["  ", "    "])]
    texts = head + runs + words + [t for t in learnt if t not in {*runs, *words}]
    count = len(texts)
    scores = [0.0] * len(head) + [-1000.0] * (len(runs) + len(words))
    rest = count - len(scores)
    scores += [-float(n // 4 if ties else n) for n in range(rest)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3]
        + [6] * 256
        + [4] * (len(runs) + len(words))
        + [1] * rest,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def synthetic() -> dict[str, dict[str, Any]]:
    """Metadata of each synthetic vocabulary by name."""
    kinds = ["default", "gpt-2", "smollm", "llama-bpe", "qwen2"]
    found = {kind: trained_pairs(kind) for kind in kinds}
    found["pieces"] = trained_pieces(True, False)
    found["pieces-bare"] = trained_pieces(False, False)
    found["pieces-ties"] = trained_pieces(True, True)
    return found


def write_gguf(path: Path, metadata: dict[str, Any]) -> None:
    """A GGUF file with metadata and no tensors."""
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


# ---- the comparison ---------------------------------------------------------------------------


def peer_ids(
    python: str, model: Path, texts: list[str], folder: Path
) -> tuple[list[list[list[int]]], str]:
    """Ids of llama.cpp, for each text without and with control tokens parsed; its version."""
    (folder / "texts.json").write_text(json.dumps(texts))
    told = [python, "-c", PEER, str(model), str(folder / "texts.json"), str(folder / "ids.json")]
    found = subprocess.run(told, capture_output=True, text=True)
    if found.returncode:
        sys.exit(f"the peer failed (is llama-cpp-python installed?): {found.stderr[-2000:]}")
    return json.loads((folder / "ids.json").read_text()), found.stdout.strip()


def own_ids(metadata: dict[str, Any], texts: list[str]) -> list[list[list[int]]]:
    """Our ids, likewise."""
    from tilegrad.models.tokens.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_gguf(metadata)
    return [[tokenizer.encode(t), tokenizer.encode(t, parse_special=True)] for t in texts]


def compare(name: str, texts: list[str], ours: list, theirs: list) -> int:
    """Print how many strings differ, and the first of them."""
    differ = [i for i in range(len(texts)) if ours[i] != theirs[i]]
    print(f"{name:14} {len(texts)} strings, {len(differ)} differ", flush=True)
    for i in differ[:3]:
        print(f"    {texts[i]!r:.200}")
        print(f"      ours   {ours[i]!s:.300}\n      theirs {theirs[i]!s:.300}")
    return len(differ)


def main() -> None:
    """Compare on all vocabularies."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--peer", default=sys.executable)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--freeze", type=Path)
    told = parser.parse_args()
    texts, frozen, rows = strings(told.count), {}, {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if told.model:
            from tilegrad.exchange.gguf import read_gguf

            theirs, version = peer_ids(told.peer, told.model, texts, folder)
            metadata = dict(read_gguf(told.model).metadata)
            label = told.model.stem
            rows[label] = compare(label, texts, own_ids(metadata, texts), theirs)
            frozen["model"] = {"texts": texts[:200], "ids": theirs[:200]}
        for kind, metadata in synthetic().items():
            write_gguf(folder / "vocabulary.gguf", metadata)
            theirs, version = peer_ids(told.peer, folder / "vocabulary.gguf", texts, folder)
            rows[f"synthetic {kind}"] = compare(kind, texts, own_ids(metadata, texts), theirs)
            frozen[kind] = {"metadata": metadata, "texts": texts[:120], "ids": theirs[:120]}
    record = measure.facts(
        kind="tokenizer", peer=f"llama-cpp-python {version}", strings=len(texts), differ=rows
    )
    print(f"written: {measure.save('tokenizer', record)}")
    if told.freeze:
        told.freeze.write_text(json.dumps(frozen, separators=(",", ":")) + "\n")
    sys.exit(1 if any(rows.values()) else 0)


if __name__ == "__main__":
    main()
