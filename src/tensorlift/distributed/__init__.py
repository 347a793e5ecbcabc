"""Several ranks of one torch.distributed group load one checkpoint together.

`ranks.Ranks` is what a load holds: who takes part (`members`), what they tell each other through a store
(`board`), what they agree on (`agreement`), and the all-gathers that complete their arenas (`communicator`,
`exchange`).
"""

from tensorlift.distributed.ranks import Ranks, join

__all__ = ["Ranks", "join"]
