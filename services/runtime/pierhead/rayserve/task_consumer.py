"""Not here: importing it says why."""

raise ImportError(
    "pierhead.rayserve.task_consumer: there are no task queues: run the queue's own worker, such as Celery's, in a "
    "service of its own"
)
