"""The parts of ShardedHead: who has which rows, answers put together, a draw over all."""
