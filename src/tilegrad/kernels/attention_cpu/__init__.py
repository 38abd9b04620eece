"""Attention on CPUs, put together of a source, holes and an engine.

| file            | holds                                                                        |
|-----------------|------------------------------------------------------------------------------|
| tiles           | arithmetic on vectors, `Source` (where tokens lie; `paged.attention_cpu` has |
|                 | one over pages), products on vectors, what every kernel has                  |
| holes           | scale, cap, bias, slopes, masks, bands, sinks, dropout: `score`, `weight`    |
| forward         | blocks of queries on vectors, softmax as it goes; sequences in a row         |
| decode          | few queries: keys streamed once, parts of them combined                      |
| matrix          | a unit of 16 x 16 tiles, and forward on it                                   |
| backward        | gradients on vectors: one Body for q, one for k and v                        |
| matrix_backward | the same on the unit                                                         |

Invariant: what is done to scores and probabilities is named in the holes alone.
"""
