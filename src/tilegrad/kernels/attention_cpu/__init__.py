"""Attention on CPUs, put together of a source, holes and an engine.

| file        | holds                                                                           |
|-------------|---------------------------------------------------------------------------------|
| source      | where tokens lie: arrays, sequences in a row (`paged.attention_cpu` has pages)  |
| engine      | the Plan; operands, products: on vectors, or a matrix unit of 16 x 16 tiles     |
| score_tiles | exponentials, the end of a row, scores between two products; forward with them, |
|             | and backward: one Body for q, one for k and v                                   |
| decode      | few queries: keys streamed once, parts of them combined                         |

Invariant: what is done to scores and probabilities is named in the holes (`attention.holes`) alone.
"""
