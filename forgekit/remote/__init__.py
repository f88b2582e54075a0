"""Files behind URLs."""

from forgekit.remote.urls import Location as Location
