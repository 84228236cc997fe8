"""The Chromium program and its command-line flags, for GUI data and for tasks that act on web pages."""

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
"""Chromium features to disable. Chromium uses only the last list of features, so the features that playwright 1.65
disables are repeated here. The last two features are the suggestion lists of the address bar. For these lists,
Chromium 156 starts two processes per window, which take most of the time of opening a page."""
FLAGS = ("--no-sandbox", "--disable-background-networking", "--disable-lcd-text", "--font-render-hinting=none",
         "--force-color-profile=srgb", "--hide-scrollbars", "--disable-features=" + ",".join(_DISABLED))
"""Command-line flags. The sandbox is off, because containers often run as root; pages are local files. The other flags
make pixels reproducible and pages fast."""

STEADY = ("--disable-partial-raster", "--disable-threaded-animation", "--disable-threaded-scrolling",
          "--disable-checker-imaging", "--disable-image-animation-resync")
"""Additional flags for screenshots, so that pixels do not depend on timing, e.g. on which parts were redrawn."""


def chromium_program(named: str = "") -> str | None:
    """Returns the Chromium program: `named` if it is not empty, else the first of BROWSERS in PATH. Returns None if
    PATH has none of them; playwright then uses its own browser. Raises ConfigError if playwright, which controls the
    browser, is not installed."""
    if importlib.util.find_spec("playwright") is None:
        raise ConfigError("playwright, which controls the browser, is not installed: pip install 'vlrl[gui]'")
    return named or next(filter(None, map(shutil.which, BROWSERS)), None)


def browser_start_error(program: str | None, error: Exception, setting: str) -> ConfigError:
    """Returns the error to raise if the browser `program` cannot be started because of `error`. setting: name of the
    setting that holds the path of `program`."""
    return ConfigError(f"{program or 'Chromium'} cannot be started: {str(error).splitlines()[0][:200]}. Install it "
                       "(apt-get install chromium, or `playwright install chromium`), or name its program with "
                       f"{setting}")
