"""django-q2 with its ORM broker on MariaDB."""

import os
import sys

import django
from django.core.management import call_command

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "django_settings")
django.setup()

from django_q.tasks import async_task  # noqa: E402  needs Django set up


def noop(number, payload):
    import sink

    sink.done(number)


def main(command, jobs=0):
    if command == "reset":
        call_command("migrate", verbosity=0)
        call_command("flush", interactive=False, verbosity=0)
    elif command == "fill":
        for number in range(int(jobs)):  # it has no call for many at once
            async_task("django_q2_adapter.noop", number, os.environ["BENCH_PAYLOAD"], save=False)
    else:
        call_command("qcluster", verbosity=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
