"""Machine: one recognizer under compositions of constraints, and their algebra."""

from llmppl.constraints.machine.index import MachineIndex as MachineIndex
from llmppl.constraints.machine.parts import Part as Part
from llmppl.constraints.machine.parts import Special as Special
from llmppl.constraints.machine.parts import part_of as part_of
