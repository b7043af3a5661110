"""django-tasks-db on MariaDB: the database backend of Django's task framework."""

import os
import sys

import django
from django.core.management import call_command

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "django_settings")
django.setup()

import django_tasks_db_job  # noqa: E402  a task's module, and it needs Django set up


def main(command, jobs=0):
    if command == "reset":
        call_command("migrate", verbosity=0)
        call_command("flush", interactive=False, verbosity=0)
    elif command == "fill":
        for number in range(int(jobs)):  # it has no call for many at once
            django_tasks_db_job.noop.enqueue(number, os.environ["BENCH_PAYLOAD"])
    else:
        call_command("db_worker", interval=0.1, startup_delay=False, verbosity=0, queue_name="default")


if __name__ == "__main__":
    main(*sys.argv[1:])
