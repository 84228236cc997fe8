"""Which Chromium is used, and its command-line flags; shared by GUI data and tasks that act on web pages."""

from __future__ import annotations

import importlib.util
import shutil

from vlrl.errors import ConfigError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chromium-headless-shell")
_DISABLED = ("AvoidUnnecessaryBeforeUnloadCheckSync", "DestroyProfileOnBrowserClose", "HttpsUpgrades",
             "HttpsFirstBalancedModeAutoEnable", "LensOverlay", "MediaRouter", "PaintHolding",
             "ThirdPartyStoragePartitioning", "AvoidCorsURLLoaderRestartOnRedirect", "TcpPortRandomizationWin",
             "OptimizationHints", "NetworkTimeServiceQuerying", "AimEnabled", "PreconnectToSearch",
             "msForceBrowserSignIn", "msEdgeUpdateLaunchServicesPreferredVersion",
             "WebUIOmniboxPopup", "WebUIOmniboxAimPopup")
"""The features that playwright 1.65 disables, since Chromium uses only the last such list, and the suggestion lists of
the address bar: two processes per window of Chromium 156 that take most of the time of a new page."""
FLAGS = ("--no-sandbox", "--disable-background-networking", "--disable-lcd-text", "--font-render-hinting=none",
         "--force-color-profile=srgb", "--hide-scrollbars", "--disable-features=" + ",".join(_DISABLED))
"""No sandbox, for containers that run as root: the pages are local files. The other flags keep pixels reproducible and
pages cheap."""

STEADY = ("--disable-partial-raster", "--disable-threaded-animation", "--disable-threaded-scrolling",
          "--disable-checker-imaging", "--disable-image-animation-resync")
"""For screenshots: pixels do not depend on timing, e.g. on which parts were redrawn."""


def chromium_program(named: str = "") -> str | None:
    """The program of Chromium: the given one, else the first on the path; None = playwright's own.

    Raises ConfigError if playwright, which drives it, is not installed.
    """
    if importlib.util.find_spec("playwright") is None:
        raise ConfigError("playwright drives the browser and is not installed: pip install 'vlrl[gui]'")
    return named or next(filter(None, map(shutil.which, BROWSERS)), None)


def browser_start_error(program: str | None, error: Exception, setting: str) -> ConfigError:
    """The error for a browser that cannot be started; `setting` names its program."""
    return ConfigError(f"{program or 'Chromium'} cannot be started: {str(error).splitlines()[0][:200]}. Install it "
                       "(apt-get install chromium, or `playwright install chromium`), or name its program with "
                       f"{setting}")
