"""The device encodings of relations: each relation that compares queries with keys has a module with its forms."""

from __future__ import annotations

from dataclasses import replace

from triton.experimental import gluon

from dash_inductor.kernels.common.device.relations import forms_of
from dash_inductor.kernels.common.device.relations.between import KV_RANGES
from dash_inductor.kernels.common.relations import Layout
from dash_inductor.model.relations import RELATIONS


def test_relations_of_queries_have_forms() -> None:
    for relation in RELATIONS:
        if relation.queries:
            of_numbers, of_positions = forms_of(relation)
            assert len(Layout.of([of_numbers, of_positions]).FORMS) == 2


@gluon.jit
def _another(s, queries, keys):
    return s


def test_texts_of_forms_tell_their_sources() -> None:
    """Triton's cache of kernels has the texts of compile-time constants in its keys."""
    assert repr(KV_RANGES) == repr(replace(KV_RANGES))
    assert repr(KV_RANGES) != repr(replace(KV_RANGES, keep=_another))
    assert "0x" not in repr(KV_RANGES)
