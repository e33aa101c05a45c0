"""A Django project for tests: its settings are configured when this module is imported, once per process."""

import django
from django.conf import settings

MIDDLEWARE = "headgate.adapters.django.HeadgateMiddleware"

settings.configure(
    ALLOWED_HOSTS=["*"],
    SECRET_KEY="for tests only",
    MIDDLEWARE=[MIDDLEWARE],
    INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "django.contrib.sessions"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    LOGGING_CONFIG=None,
)
django.setup()
