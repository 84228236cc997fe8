"""The cache of rows that are being written: what was written stays, also when the space grows."""

import functools

import torch

from vlrl.engine.cache import ROOM, RoomyLayer, cache_argument


def test_a_layer_keeps_its_tokens_when_it_grows_and_when_rows_leave():
    layer, number = RoomyLayer(), 3 * ROOM
    tokens = torch.arange(2.0 * number).view(2, 1, number, 1)  # two rows
    layer.update(tokens[:, :, :5], -tokens[:, :, :5])
    for t in range(5, number):
        if t == 2 * ROOM:
            layer.batch_select_indices(torch.tensor([1]))
            tokens = tokens[1:]
        keys, values = layer.update(tokens[:, :, t:t + 1], -tokens[:, :, t:t + 1])
        assert torch.equal(keys, tokens[:, :, :t + 1]) and torch.equal(values, -keys)
    assert layer.get_seq_length() == number


class Renamed:
    @functools.wraps(lambda self, input_ids, cache=None, **kwargs: None)
    def forward(self, *args, **kwargs):
        """As transformers wraps it, for callers who give the former name."""


class Former:
    def forward(self, input_ids, past_key_values=None, **kwargs):
        ...


def test_the_cache_goes_under_the_name_that_the_model_has():
    for model, name in ((Renamed, "cache"), (Former, "past_key_values")):
        assert cache_argument(model) == name, (model, name)
