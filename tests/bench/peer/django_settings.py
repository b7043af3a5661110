"""One Django project for both of Django's queues, on MariaDB."""

import os
from urllib.parse import urlparse

parts = urlparse(os.environ["BENCH_DATABASE_URL"])
SECRET_KEY = "bench"
USE_TZ = True
LOGGING_CONFIG = None
INSTALLED_APPS = ["django.contrib.contenttypes", os.environ["BENCH_DJANGO_APP"]]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.mysql",
        "HOST": parts.hostname,
        "PORT": parts.port,
        "USER": parts.username,
        "PASSWORD": parts.password,
        "NAME": parts.path.lstrip("/"),
        "CONN_MAX_AGE": None,
    }
}
TASKS = {"default": {"BACKEND": "django_tasks_db.DatabaseBackend", "QUEUES": ["default"]}}
Q_CLUSTER = {
    "name": "bench",
    "orm": "default",
    "workers": int(os.environ.get("BENCH_CONCURRENCY", "1")),
    "bulk": 50,  # jobs fetched at once; its default is 1
    "queue_limit": 500,
    "poll": 0.1,  # seconds; its default is 0.2
    "save_limit": -1,  # keep no successful results
    "timeout": 60,
    "retry": 120,
    "scheduler": False,
    "log_level": "ERROR",
}
