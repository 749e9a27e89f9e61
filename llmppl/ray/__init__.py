"""Many tasks on many machines, by Ray (the extra `ray`)."""

from llmppl.ray.actors import run_many as run_many
