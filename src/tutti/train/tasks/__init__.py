"""Tasks: how rows become batches, which loss is taken, and how it is scored."""

from tutti.extras import extra

with extra("train"):
    from tutti.train.tasks.table import TASKS, get_task
    from tutti.train.tasks.task import Task

__all__ = ["TASKS", "Task", "get_task"]
