r"""Data to train and examine a small multimodal model: pictures, questions, facts, a tokenizer, packs and marks.

    scenes ---> questions ---> chats ---> samples      what is trained on
        \           \          facts                   facts come from data/domain
         \-----------\--------> exam ---> score        what is held out, and what guessing would give

A training pack is a function of (seed, step, micro step) alone, an exam of its arguments.
"""

from workbench.training.data.chats import Chat, Mixture, make_chat, picture_message
from workbench.training.data.domain import DOMAIN_ROOT, Fact, read_facts
from workbench.training.data.exam import (
    ExamItem,
    fact_exam,
    picture_exam,
    with_blank_pictures,
    with_shuffled_pictures,
)
from workbench.training.data.looking import caption
from workbench.training.data.questions import KINDS, Kind, Question, ask
from workbench.training.data.samples import PackedBatch, Sample, SampleStream, pack_samples, tokenise_chat
from workbench.training.data.scenes import Scene, draw_scene, make_scene, scene_image, split_of
from workbench.training.data.score import BlindGuesser, Mark, ScoreTable, is_right, score, wilson_interval
from workbench.training.data.tokenizer import VOCAB_SIZE, corpus_lines, train_tokenizer, write_tokenizer

__all__ = [
    "DOMAIN_ROOT",
    "KINDS",
    "VOCAB_SIZE",
    "BlindGuesser",
    "Chat",
    "ExamItem",
    "Fact",
    "Kind",
    "Mark",
    "Mixture",
    "PackedBatch",
    "Question",
    "Sample",
    "SampleStream",
    "Scene",
    "ScoreTable",
    "ask",
    "caption",
    "corpus_lines",
    "draw_scene",
    "fact_exam",
    "is_right",
    "make_chat",
    "make_scene",
    "pack_samples",
    "picture_exam",
    "picture_message",
    "read_facts",
    "scene_image",
    "score",
    "split_of",
    "tokenise_chat",
    "train_tokenizer",
    "wilson_interval",
    "with_blank_pictures",
    "with_shuffled_pictures",
    "write_tokenizer",
]
